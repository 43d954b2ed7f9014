"""An exported checkpoint in the hands of others: transformers, vLLM and PEFT see what the trainer saw."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph import cli
from rolegraph.batch import Batch
from rolegraph.checkpoints import folder as folders
from rolegraph.checkpoints.export import export
from rolegraph.config import load
from rolegraph.interfaces import SamplingParams
from rolegraph.run import save_config
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.rollout.replica import replica
from tests.roles.train.megatron_workers import NLL, make_batch

pytestmark = pytest.mark.engine

Start = Callable[..., Any]
ROWS = make_batch(6, 9)
ROWS_OF_HEAD = 301
README = (Path(__file__).parents[3] / "README.md").read_text()


def checkpoint(
    start: Start, base: Path, run_dir: Path, *, backend: str = "megatron", **settings: Any
) -> tuple[Path, Any]:
    """A checkpoint of a run on the tied model, and the trainer's logprobs then, [tokens]."""
    role = start(base.name, backend=backend, **settings)
    for seed in range(2):
        role.step(make_batch(8, seed), loss=NLL)
    overrides = [
        "algorithm=sft",
        f"train={backend}",
        "data=jsonl",
        "data.path=rows.jsonl",
        "data.max_length=64",
        "model=hf",
        f"model.path={base}",
    ]
    run = load([*overrides, *(f"train.{key}={value}" for key, value in settings.items())]).run
    path = folders.begin(run_dir, 2)
    save_config(run, path / "config.yaml")
    role.save(str(path / "train"))
    role.finish_save()
    folders.complete(path, 2, metrics={"loss": 0.5})
    logprobs = _values(role.logprobs(ROWS), "logprobs")
    role.teardown()  # what exports is a train role in this process too
    return run_dir, logprobs


def _values(batch: Batch, name: str) -> Any:
    return batch.ragged(name).values.copy()


def _of(model: Any) -> Any:
    """What a model of transformers says of the same response tokens, [tokens]."""
    found = []
    for prompt, response in zip(ROWS.lists("prompt_ids"), ROWS.lists("response_ids"), strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.long)[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        found.append(picked[len(prompt) - 1 :].numpy())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A tied model with a tokenizer, a chat template and settings of generation."""
    path = folder / "exported"
    make_checkpoint(path, "qwen3", tied=True, vocab_size=ROWS_OF_HEAD)
    add_tokenizer(path, ROWS_OF_HEAD, eos=[1, 2])
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (path / "README.md").write_text("of the base model")
    return path


def test_transformers_loads_it_with_the_trainers_logprobs(
    start: Start, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does; written by the command that the README shows."""
    from transformers import AutoModelForCausalLM

    words = shlex.split(next(line for line in README.splitlines() if line.startswith("    rolegraph export ")))
    monkeypatch.chdir(tmp_path)
    run_dir, expected = checkpoint(start, base, tmp_path / words[2])
    assert cli.dispatch(words[1:]) == 0
    out = tmp_path / words[3]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert np.abs(_of(model) - expected).max() < 1e-4
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, "the head is tied"
    assert model.get_output_embeddings().weight.shape[0] == ROWS_OF_HEAD
    names = {path.name for path in (out).iterdir()}
    assert {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer_config.json"} <= names
    assert "of the base model" not in (out / "README.md").read_text()
    texts = [path.read_text() for path in (out).iterdir() if path.suffix in (".json", ".md")]
    assert not any(str(base) in text or str(tmp_path) in text for text in texts), "paths of this machine"

    drawn = _drawn(out)
    assert np.abs(_values(drawn, "rollout_logprobs") - _rescored(start, base, run_dir, drawn)).max() < 1e-4


def _drawn(out: Path) -> Batch:
    """Samples of a vLLM engine on the exported folder."""
    prompts = ROWS.select(["uid", "prompt_ids"])
    with replica(model=str(out), max_model_len=64) as engine:
        samples: Batch = engine.generate(prompts, SamplingParams(n=1, max_tokens=8, temperature=1.0, seed=3))
    return samples


def _rescored(start: Start, base: Path, run_dir: Path, drawn: Batch) -> Any:
    """The same samples as a trainer that loads the checkpoint scores them."""
    role = start(base.name)
    role.load(str(run_dir / "checkpoints" / "step-2" / "train"), weights_only=True)
    return _values(role.logprobs(drawn), "logprobs")


def test_an_adapter_is_exported_alone_and_merged(start: Start, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_dir, expected = checkpoint(start, base, tmp_path / "run", tuner_type="lora", lora_rank=4)
    export(run_dir, tmp_path / "merged")
    export(run_dir, tmp_path / "adapter", adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert np.abs(_of(merged) - expected).max() < 1e-4
    bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(_of(bare) - expected).max() > 1e-2
    assert np.abs(_of(PeftModel.from_pretrained(bare, tmp_path / "adapter")) - expected).max() < 1e-4
    assert (tmp_path / "adapter" / "README.md").exists()


def test_the_backend_of_transformers_exports_by_the_same_command(start: Start, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_dir, expected = checkpoint(start, base, tmp_path / "run", backend="huggingface")
    assert cli.dispatch(["export", str(run_dir), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert np.abs(_of(model) - expected).max() < 1e-4
