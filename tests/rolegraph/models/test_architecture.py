"""The sizes of a model from its config.json, wherever that is, and parameter counts against real checkpoints."""

from __future__ import annotations

import http.server
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolegraph.models import ModelConfig, ensure, tiny
from rolegraph.models.architecture import UnknownArchitectureError, architecture, positions, read_config

TINY = "rolegraph.models.tiny.make"
SMOLLM2 = "rolegraph.models.smollm2.make"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def checkpoint_parameters(folder: str) -> int:
    from safetensors import safe_open

    total = 0
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("args", [{}, {"tie_word_embeddings": False, "layers": 3, "kv_heads": 1}])
def test_tiny_is_described_before_it_is_made(tmp_path: Path, args: dict[str, Any]) -> None:
    described = read_config(ModelConfig(maker=TINY, args=args))
    tiny.make(str(tmp_path), **args)
    assert described == json.loads((tmp_path / "config.json").read_text())
    assert architecture(described).parameters == checkpoint_parameters(str(tmp_path))


def test_smollm2_is_described_before_it_is_made() -> None:
    sizes = architecture(read_config(ModelConfig(maker=SMOLLM2)))
    assert sizes.parameters == 134_515_008


@pytest.mark.slow
def test_the_description_of_smollm2_is_that_of_its_checkpoint() -> None:
    pytest.importorskip("gguf")
    folder = ensure(ModelConfig(maker=SMOLLM2))
    described, written = read_config(ModelConfig(maker=SMOLLM2)), read_config(ModelConfig(path=folder))
    assert {key: written[key] for key in described} == described
    assert architecture(written).parameters == checkpoint_parameters(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 48}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2}),
        ("Mistral", {}),
    ],
)
def test_parameters_of_every_kind(kind: str, changes: dict[str, Any]) -> None:
    import torch
    import transformers

    sizes = {**LLAMA, "num_key_value_heads": 2, **changes}
    del sizes["model_type"]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert architecture(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from rolegraph.models import ModelConfig; from rolegraph.models.architecture import read_config\n"
        f"[read_config(ModelConfig(maker=m)) for m in ({TINY!r}, {SMOLLM2!r})]\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_maker_without_a_description_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "undescribed.py").write_text("raise AssertionError('imported')\ndef make(folder): ...\n")
    (tmp_path / "misdescribed.py").write_text("def make(folder, a=1): ...\ndef describe(a): return {'a': a}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnknownArchitectureError, match=r"undescribed has no function describe\(\*\*args\)"):
        read_config(ModelConfig(maker="undescribed.make"))
    assert read_config(ModelConfig(maker="misdescribed.make")) == {"a": 1}
    with pytest.raises(UnknownArchitectureError, match=r"model\.maker=misdescribed\.make: TypeError"):
        read_config(ModelConfig(maker="misdescribed.make", args={"b": 2}))


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(ModelConfig(path="owner/name")) == LLAMA
    assert read_config(ModelConfig(path="owner/name", revision="abc")) == LLAMA
    with pytest.raises(UnknownArchitectureError, match="owner/other is not on this machine yet"):
        read_config(ModelConfig(path="owner/other"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub on this machine that knows one model; the paths it was asked for."""
    from huggingface_hub import constants

    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/owner/name/resolve/main/config.json" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(LLAMA).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    yield asked
    server.shutdown()
    server.server_close()


def test_a_model_on_the_hub(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with pytest.raises(UnknownArchitectureError):
        read_config(ModelConfig(path="owner/name"))
    assert hub == [], "nothing is fetched unless asked for"
    assert read_config(ModelConfig(path="owner/name"), fetch_s=5) == LLAMA
    with pytest.raises(UnknownArchitectureError, match=r"the hub did not give its config\.json"):
        read_config(ModelConfig(path="owner/other"), fetch_s=5)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnknownArchitectureError, match="HF_HUB_OFFLINE is set"):
        read_config(ModelConfig(path="owner/name"), fetch_s=5)


def test_what_a_config_may_lack(tmp_path: Path) -> None:
    sizes = architecture(LLAMA)
    assert (sizes.num_key_value_heads, sizes.head_dim, sizes.tie_word_embeddings) == (4, 16, False)
    with pytest.raises(UnknownArchitectureError, match="model type 'gemma9' has no formula"):
        architecture({**LLAMA, "model_type": "gemma9"})
    with pytest.raises(UnknownArchitectureError, match=r"lacks a size: KeyError: 'hidden_size'"):
        architecture({key: value for key, value in LLAMA.items() if key != "hidden_size"})
    with pytest.raises(UnknownArchitectureError, match="some of its layers have no experts"):
        architecture({**LLAMA, "model_type": "qwen3_moe", "decoder_sparse_step": 2})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownArchitectureError, match="is no JSON"):
        read_config(ModelConfig(path=str(tmp_path)))
    assert architecture({"text_config": LLAMA}) == sizes


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 4096),
    ],
)
def test_positions(rope: dict[str, Any], expected: int) -> None:
    assert positions({"max_position_embeddings": 4096, **rope}) == expected
    assert positions(rope) is None
