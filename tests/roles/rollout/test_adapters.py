"""An engine that keeps its weights and takes the adapter that is trained, in place, at every sync."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import AdapterInfo, SamplingParams, TensorInfo
from roles.rollout.manifest import check_adapter
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.rollout.replica import checkpoint_tensors, logprob_error, manifest_of, push, replica
from tests.roles.rollout.test_vllm import TOKENIZER_IDS, prompts

SAMPLING = SamplingParams(n=2, temperature=0.7, max_tokens=12, seed=3)
ADAPTERS = [
    AdapterInfo(4, 12.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    AdapterInfo(8, 8.0, ("v_proj", "up_proj")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    made = make_checkpoint(path, "qwen3", vocab_size=400, initializer_range=0.1)
    add_tokenizer(path, TOKENIZER_IDS)
    return made


@pytest.fixture(scope="module")
def role(folder: str) -> Iterator[Any]:
    with replica(model=folder, enable_lora=True, max_lora_rank=8) as running:
        yield running


def trained(folder: str, info: AdapterInfo, out: Path) -> dict[str, torch.Tensor]:
    """Tensors of a random adapter, as PEFT names them; the model with it merged goes to `out`."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=info.rank, lora_alpha=int(info.alpha), target_modules=list(info.targets))
    model = peft.get_peft_model(base, config)
    torch.manual_seed(info.rank)
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            param.data.normal_(std=0.1)
    tensors = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    model.merge_and_unload().save_pretrained(out)
    add_tokenizer(out, TOKENIZER_IDS)
    return tensors


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_each_sync_replaces_the_adapter_and_leaves_the_weights(role: Any, folder: str, tmp_path: Path) -> None:
    before = role.generate(prompts(), SAMPLING)
    assert logprob_error(folder, before, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    for version, info in enumerate(ADAPTERS, 1):
        merged = tmp_path / str(version)
        tensors = trained(folder, info, merged)
        push(role, tensors.items(), manifest_of(tensors), version, adapter=info)
        batch = role.generate(prompts(), SAMPLING)
        assert set(batch.numpy("weight_version")) == {version}
        assert logprob_error(merged, batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
        assert logprob_error(folder, batch, temperature=0.7, ids=TOKENIZER_IDS) > 0.05


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_running_samples_go_on_with_the_new_adapter(role: Any, folder: str, tmp_path: Path) -> None:
    tensors = trained(folder, ADAPTERS[0], tmp_path / "merged")
    long = SamplingParams(n=8, temperature=0.7, max_tokens=170, seed=1, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(role.generate, prompts(2), long)
        time.sleep(0.1)
        push(role, tensors.items(), manifest_of(tensors), 50, adapter=ADAPTERS[0])
        batch = running.result(60)
    assert max(batch.numpy("weight_version")) < 50
    assert set(batch.numpy("weight_version_last")) == {50}
    # What is drawn after the sync is drawn with the adapter: the end of a row has the logprobs of the merged model.
    tail = [row[-20:] for row in batch.lists("rollout_logprobs")]
    assert tail_error(tmp_path / "merged", batch, tail) < 1e-4


def tail_error(folder: Path, batch: Any, tails: list[Any]) -> float:
    from transformers import AutoModelForCausalLM

    model, worst = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0.0
    for prompt, response, tail in zip(batch.lists("prompt_ids"), batch.lists("response_ids"), tails, strict=True):
        tokens = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        with torch.no_grad():
            table = torch.log_softmax(model(tokens).logits[0, :-1, :TOKENIZER_IDS].float() / 0.7, -1)
        wanted = table.gather(1, tokens[0, 1:, None])[-len(tail) :, 0]
        worst = max(worst, float((wanted - torch.from_numpy(tail.copy())).abs().max()))
    return worst


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_what_does_not_fit_is_refused_and_the_adapter_stays(role: Any, folder: str, tmp_path: Path) -> None:
    info = ADAPTERS[1]
    tensors = trained(folder, info, tmp_path / "merged")
    push(role, tensors.items(), manifest_of(tensors), 60, adapter=info)
    whole = checkpoint_tensors(folder)
    with pytest.raises(WeightSyncError, match=r"sends all weights, and the engine has rollout.enable_lora=true"):
        push(role, whole.items(), manifest_of(whole), 61)
    strange = {name.replace("v_proj", "w_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(WeightSyncError, match=r"unknown .*w_proj"):
        push(role, strange.items(), manifest_of(strange), 62, adapter=info)
    large = AdapterInfo(16, 8.0, ("v_proj",))
    wide = trained(folder, large, tmp_path / "wide")
    with pytest.raises(WeightSyncError, match="rank 16 is greater"):
        push(role, wide.items(), manifest_of(wide), 63, adapter=large)


def test_misfits_are_named() -> None:
    weights = {"model.layers.0.self_attn.q_proj.weight": (12, 8)}
    module, adapter = "base_model.model.model.layers.0.self_attn.q_proj", AdapterInfo(2, 2.0, ("q_proj",))
    a, b = TensorInfo(f"{module}.lora_A.weight", (2, 8), "float32"), TensorInfo(f"{module}.lora_B.weight", (12, 2), "")
    check_adapter([a, b], weights, adapter)
    with pytest.raises(WeightSyncError, match=r"lora_A.weight has shape \[2, 12\], the model wants \[2, 8\]"):
        check_adapter([replace(a, shape=(2, 12)), b], weights, adapter)
    with pytest.raises(WeightSyncError, match=r"unknown base_model.model.lm_head"):
        check_adapter([replace(a, name="base_model.model.lm_head.lora_A.weight")], weights, adapter)
