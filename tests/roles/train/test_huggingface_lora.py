"""Adapters on the role on transformers: PEFT's own numbers, what leaves, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.models import ModelConfig
from rolegraph.models.architecture import architecture, read_config
from rolegraph.placement.memory import Sharded
from tests.models import VOCAB
from tests.roles.train import lora_workers
from tests.roles.train.huggingface_workers import held
from tests.roles.train.lora_workers import LORA, SEED, batches
from tests.roles.train.megatron_workers import NLL, OPTIMIZER

pytestmark = pytest.mark.engine

Start = Callable[..., Any]


@pytest.fixture
def hf(start: Start) -> Start:
    return partial(start, backend="huggingface", seed=SEED, **OPTIMIZER, **LORA)


def logprobs(role: Any, **kwargs: Any) -> Any:
    column = "ref_logprobs" if kwargs.get("reference") else "logprobs"
    return role.logprobs(batches()[0], **kwargs).ragged(column).values


def estimated(role: Any) -> dict[str, int]:
    """What the plan says that the only rank holds."""
    sizes, width = architecture(read_config(ModelConfig(path=role.config.model))), role._policy.dtype.itemsize
    adapter = role.config.adapter
    found = Sharded(sizes, width, tokens=1, adapter_rank=adapter.rank, adapter_targets=adapter.targets).state(0)
    return dict(found)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "lora_targets": ["q_proj", "down_proj"]}])
def test_trains_as_peft_does_and_leaves_both_ways(hf: Start, folder: Path, tmp_path: Path, settings: Any) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    targets = {key: value for key, value in settings.items() if key == "lora_targets"}
    expected = lora_workers.reference_run(folder, "qwen3", **targets)
    role = hf(micro_batch_size=3, **settings)
    assert np.abs(logprobs(role) - expected["first"].numpy()).max() < 1e-5
    metrics = [role.step(batch, loss=NLL) for batch in batches()]
    assert np.abs([each["loss"] for each in metrics] - np.array(expected["losses"])).max() < 1e-4
    assert np.abs([each["grad_norm"] for each in metrics] - np.array(expected["norms"])).max() < 1e-3
    after = logprobs(role)
    assert np.abs(after - expected["after"].numpy()).max() < 2e-3
    # Without adapters it is the model of the start, and they come back.
    assert np.abs(logprobs(role, reference=True) - expected["first"].numpy()).max() < 1e-5
    assert role._policy.reference is None
    assert (logprobs(role) == after).all()

    sent = {name: tensor.clone() for name, tensor in role._adapters.tensors()}
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == expected["sizes"]
    assert [info.name for info in role.weight_manifest(adapter=True)] == list(sent)
    assert role.adapter_info().targets == tuple(
        dict.fromkeys(name.split(".lora_")[0].rsplit(".", 1)[1] for name in sent)
    )
    role.export_hf(str(tmp_path / "merged"))
    role.export_hf(str(tmp_path / "adapter"), adapter=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for model in (merged, beside):
        with torch.no_grad():
            found = lora_workers._hf_logprobs(model, batches()[0], 1.0)[0]
        assert np.abs(found.numpy() - after).max() < 1e-5

    role.save_reference()
    role.average_weights(0.5)
    role.step(batches()[1], loss=NLL)
    assert (logprobs(role, reference=True) == after).all()


def test_layers_that_lie_the_other_way_round(hf: Start, folder: Path, tmp_path: Path) -> None:
    """GPT-2's matrices are [in, out]."""
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2-lora")
    role = hf("gpt2-lora", lora_targets=["c_attn", "c_proj"])
    for batch in batches():
        role.step(batch, loss=NLL)
    role.export_hf(str(tmp_path / "merged"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        found = lora_workers._hf_logprobs(merged, batches()[0], 1.0)[0]
    assert np.abs(found.numpy() - logprobs(role)).max() < 1e-5
    assert np.abs(found.numpy() - logprobs(role, reference=True)).max() > 1e-2


def test_trains_float32_adapters_beside_bfloat16(hf: Start) -> None:
    exact = logprobs(hf())
    role = hf(dtype="bfloat16")
    kinds = {(param.requires_grad, param.dtype) for param in role._policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    counted = estimated(role)
    assert {name: held(role)[name] for name in ("weights", "optimizer")} == {
        "weights": counted["weights"],
        "optimizer": 0,
    }
    assert 0 < np.abs(logprobs(role) - exact).max() < 0.5
    losses = [role.step(batches()[0], loss=NLL)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.5
    assert held(role)["optimizer"] == counted["optimizer"]
    assert np.abs(logprobs(role, reference=True) - exact).max() < 0.5


def test_experts_stay_as_they_are(hf: Start, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    with caplog.at_level("INFO"):
        role = hf("qwen3_moe", micro_batch_size=3)
    assert caplog.text.count("no adapters in mlp, where Qwen3MoeForCausalLM has experts") == 1
    assert role.adapter_info().targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    for batch in batches():
        role.step(batch, loss=NLL)
    assert {name: held(role)[name] for name in ("weights", "optimizer")} == {
        name: estimated(role)[name] for name in ("weights", "optimizer")
    }
    role.export_hf(str(tmp_path / "adapter"), adapter=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3_moe", dtype=torch.float32)
    with torch.no_grad():
        beside = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        found = lora_workers._hf_logprobs(beside, batches()[0], 1.0)[0]
    assert np.abs(found.numpy() - logprobs(role)).max() < 1e-5
    assert np.abs(found.numpy() - logprobs(role, reference=True)).max() > 1e-2


def test_checkpoints_hold_the_adapter_alone(hf: Start, start: Start, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    role = hf()
    role.step(batches()[0], loss=NLL)
    (tmp_path / "saved").mkdir()
    role.save(str(tmp_path / "saved"))
    followed = role.step(batches()[1], loss=NLL)["loss"]
    role.finish_save()
    role.save_reference()
    names = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in names if not name.startswith("rng."))
    role.load(str(tmp_path / "saved"))
    assert role._policy.reference is None
    assert role.step(batches()[1], loss=NLL)["loss"] == followed
    role = start(backend="huggingface")
    with pytest.raises(CheckpointError, match=r"adapter is .* in it, and None here"):
        role.load(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"no adapter alone: set train\.tuner_type=lora"):
        role.export_hf(str(tmp_path / "none"), adapter=True)


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("qwen3", ["q_proj", "query"], "lora_targets names query, which .*Qwen3ForCausalLM does not have"),
        ("qwen3", ["query"], "does not fit Qwen3ForCausalLM: .*query.* not found"),
        ("qwen3", ["q_proj", "lm_head"], "lm_head makes the logits, .* leave it out"),
        ("qwen3_moe", ["lm_head"], "lm_head makes the logits, .* leave it out"),
        (
            "qwen3_moe",
            ["q_proj", "gate_proj", "up_proj"],
            "experts is Qwen3MoeExperts, and .* leave it out, and the names of what it holds",
        ),
        ("qwen3", ["embed_tokens"], "embed_tokens is Embedding, and adapters here are for linear layers: leave it out"),
    ],
)
def test_refuses(hf: Start, kind: str, targets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf(kind, lora_targets=targets)
