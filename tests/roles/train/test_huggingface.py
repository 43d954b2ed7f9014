"""The train role on transformers, on one rank: the numbers of Megatron, and models that Megatron does not have."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolegraph.errors import ConfigError, RoleGraphError, TurnError
from rolegraph.interfaces import HeadInfo, LossSpec, TransferGroup
from rolegraph.models import ModelConfig
from rolegraph.models.architecture import architecture, read_config
from rolegraph.placement.memory import Sharded
from roles.train.config import HuggingFaceTrainConfig
from roles.train.offload import Offload
from tests.models import VOCAB, make_checkpoint
from tests.roles.train.huggingface_workers import held
from tests.roles.train.megatron_workers import NLL, OPTIMIZER, grouped, make_batch

pytestmark = pytest.mark.engine

Start = Callable[..., Any]
DISTILL = LossSpec("rolegraph.losses.distill.DistillLoss", {"beta": 0.0})
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
OTHERS: dict[str, dict[str, Any]] = {
    # Dropout, learned positions and biases; a tied head.
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 128},
    # States that are projected before the head; positions that count from 2.
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    # Logits that are capped and heads of their own width.
    "gemma2": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 6},
    # A head with a bias.
    "phi": {**SIZES, "intermediate_size": 96},
    # Logits that are scaled, and layers without a norm of their own for the MLP.
    "cohere": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 4, "logit_scale": 0.5},
}


@pytest.fixture
def hf(start: Start) -> Start:
    return partial(start, backend="huggingface")


def flat(batch: Any, name: str) -> Any:
    return batch.ragged(name).values


def weights(role: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in role._export.tensors()}


def trained(role: Any) -> dict[str, Any]:
    """Scores before and after three steps, and what these say."""
    batches = [grouped(make_batch(8, seed)) for seed in range(3)]
    before = role.logprobs(batches[0], temperature=0.8, entropy=True)
    metrics = [role.step(batch, loss=NLL) for batch in batches]
    return {
        "logprobs": flat(before, "logprobs"),
        "entropy": flat(before, "entropy"),
        "loss": np.array([each["loss"] for each in metrics]),
        "grad_norm": np.array([each["grad_norm"] for each in metrics]),
        "after": flat(role.logprobs(batches[0]), "logprobs"),
    }


# ----- the numbers -----


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_scores_and_trains_as_megatron_does(start: Start, kind: str) -> None:
    expected = trained(start(kind, **OPTIMIZER))
    layouts: list[dict[str, Any]] = [
        {},
        {"padding_free": True, "micro_batch_size": 3},
        {"gradient_checkpointing": True, "reduce_each_micro_batch": True, "max_tokens_per_micro_batch": 40},
    ]
    for layout in layouts:
        found = trained(start(kind, backend="huggingface", **OPTIMIZER, **layout))
        for name, limit in {"logprobs": 1e-5, "entropy": 1e-5, "loss": 1e-4, "grad_norm": 1e-3, "after": 2e-3}.items():
            assert np.abs(found[name] - expected[name]).max() < limit, (layout, name)


@pytest.fixture(scope="module")
def others(folder: Path) -> Path:
    import transformers

    for kind, sizes in OTHERS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).float()
        for name, param in model.named_parameters():
            param.data += 0.1 * torch.randn_like(param) if param.dim() == 1 or "embed" in name else 0.0
        model.save_pretrained(folder / kind)
    return folder


@pytest.mark.parametrize("kind", OTHERS)
def test_trains_models_that_megatron_has_not(hf: Start, others: Path, kind: str, tmp_path: Path) -> None:
    """As the model itself does with whole logits, and what leaves has the names on disk."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    batch = make_batch(6, 0)
    # To recompute layers, a model is told that it trains: no dropout may come of it.
    role = hf(kind, micro_batch_size=4, clip_grad=0.0, gradient_checkpointing=kind == "gpt2")
    scored = role.logprobs(batch, temperature=0.8, entropy=True)
    assert np.array_equal(flat(role.logprobs(batch, temperature=0.8), "logprobs"), flat(scored, "logprobs"))
    metrics = role.step(batch, loss=NLL, temperature=0.8)
    model = AutoModelForCausalLM.from_pretrained(others / kind, dtype=torch.float32).eval()
    tables = []
    for prompt, response in zip(batch.lists("prompt_ids"), batch.lists("response_ids"), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        tables.append(torch.log_softmax(model(ids).logits[0].float() / 0.8, -1)[len(prompt) - 1 : -1])
    table = torch.cat(tables)
    logprobs = table.gather(-1, torch.from_numpy(flat(batch, "response_ids").astype(np.int64))[:, None])[:, 0]
    mask = torch.from_numpy(flat(batch, "response_mask").astype(np.float32))
    loss = -(logprobs * mask).sum() / mask.sum()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf))
    assert np.abs(flat(scored, "logprobs") - logprobs.detach().numpy()).max() < 1e-5
    assert np.abs(flat(scored, "entropy") - -(table.exp() * table).sum(-1).detach().numpy()).max() < 1e-5
    assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx((float(loss), norm), rel=1e-4)
    role.export_hf(str(tmp_path / "out"))
    disk, out = load_file(others / kind / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert disk.keys() == out.keys() == {info.name for info in role.weight_manifest()}
    assert any(not torch.equal(disk[name], out[name]) for name in disk)
    drops = [
        {key: value for key, value in json.loads((path / "config.json").read_text()).items() if "drop" in key}
        for path in (others / kind, tmp_path / "out")
    ]
    assert drops[0] == drops[1]


def test_recomputing_layers_makes_none_of_them_noisy(hf: Start, folder: Path) -> None:
    """A router that jitters in training would tell of another policy than the one that is scored."""
    import transformers

    sizes = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, router_jitter_noise=0.9, attention_dropout=0.5)
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "mixtral")
    found = {}
    for recomputes in (False, True):
        role, calls = hf("mixtral", gradient_checkpointing=recomputes), [0]
        attention = role._policy.model.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        metrics = role.step(make_batch(6, 0), loss=NLL, lr=0.0)
        assert calls == [1 + recomputes]
        found[recomputes] = (metrics["loss"], metrics["grad_norm"])
    assert found[True] == pytest.approx(found[False], rel=1e-5)


def test_dropout_is_off_in_nested_configurations_too() -> None:
    import transformers

    from roles.train.huggingface_model import without_dropout

    config = transformers.Gemma3Config(text_config={"attention_dropout": 0.5}, vision_config={"attention_dropout": 0.5})
    without_dropout(config)
    assert (config.text_config.attention_dropout, config.vision_config.attention_dropout) == (0.0, 0.0)


def test_computes_in_bfloat16_and_trains_float32(hf: Start) -> None:
    exact = flat(hf().logprobs(make_batch(8, 0)), "logprobs")
    role = hf(dtype="bfloat16", reference="initial")
    assert {param.dtype for param in role._policy.model.parameters()} == {torch.float32}
    sizes = architecture(read_config(ModelConfig(path=role.config.model)))
    assert Sharded(sizes, width=2, tokens=1).state(0)["weights"] == held(role)["weights"]
    assert 0 < np.abs(flat(role.logprobs(make_batch(8, 0)), "logprobs") - exact).max() < 0.5
    losses = [role.step(make_batch(8, 0), loss=NLL)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1
    assert all(info.dtype == "bfloat16" for info in role.weight_manifest())


# ----- steps -----


def test_a_step_that_is_no_number_changes_no_weight(hf: Start) -> None:
    role = hf()
    before = weights(role)
    metrics = role.step(make_batch(4, 0), loss=LossSpec("tests.losses_for_tests.broken"))
    assert metrics["skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(role).items())
    assert role.step(make_batch(4, 0), loss=NLL)["skipped"] == 0.0
    assert not any(torch.equal(tensor, before[name]) for name, tensor in weights(role).items())


def test_a_loss_without_a_gradient_and_an_empty_batch_are_zero_steps(hf: Start) -> None:
    role = hf()
    assert role.step(make_batch(4, 0), loss=LossSpec("tests.losses_for_tests.constant"))["grad_norm"] == 0.0
    metrics = role.step(make_batch(4, 0).slice(0, 0), loss=NLL)
    assert (metrics["loss"], metrics["grad_norm"], metrics["rows"], metrics["tokens"]) == (0.0, 0.0, 0.0, 0.0)
    assert len(role.logprobs(make_batch(4, 0).slice(0, 0))) == 0


def test_schedule_clipping_and_reset(hf: Start) -> None:
    role = hf(lr=0.1, lr_schedule="linear", warmup_steps=1, decay_steps=5, min_lr=0.01, clip_grad=0.25)
    batch = make_batch(4, 0)
    first = role.step(batch, loss=NLL)
    assert first["lr"] == pytest.approx(0.05)
    assert first["grad_norm"] > 1.0
    moments = [state["exp_avg"].full_tensor() for state in role._policy.optimizer.state.values()]
    # Adam's first moment after one step is 0.1 of the clipped gradient.
    assert float(torch.stack([moment.norm() for moment in moments]).norm()) * 10 == pytest.approx(0.25, rel=1e-4)
    assert [role.step(batch, loss=NLL, lr=lr)["lr"] for lr in (None, 0.5, None)] == pytest.approx([0.1, 0.5, 0.055])
    role.reset_optimizer()
    assert not role._policy.optimizer.state
    assert role.step(batch, loss=NLL)["lr"] == pytest.approx(0.05)


# ----- the policy's other weights -----


def test_other_weights_score_and_teach_and_the_policys_own_come_back(hf: Start) -> None:
    role, batch = hf(micro_batch_size=3), make_batch(8, 0)
    with pytest.raises(RoleGraphError, match=r"train\.reference=initial"):
        role.logprobs(batch, reference=True)
    role.step(batch, loss=NLL)
    role.save_reference()
    role.average_weights(0.75)
    kept, expected = flat(role.logprobs(batch), "logprobs").copy(), weights(role)
    role.step(batch, loss=NLL)
    role.average_weights(0.75)
    expected = {name: 0.75 * expected[name] + 0.25 * now for name, now in weights(role).items()}
    now = role.logprobs(batch)
    scored = role.logprobs(batch.merge(now), reference=True)
    assert np.array_equal(flat(scored, "ref_logprobs"), kept)
    assert np.abs(flat(now, "logprobs") - kept).max() > 1e-2
    with role._policy.holding("average"):
        for name, tensor in weights(role).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    for which in ("current", "initial", "average"):
        taught = role.teach(batch, weights=which, hidden=True, topk=4)
        role.use_teacher_head(which)
        loss = role.step(batch.merge(taught), loss=DISTILL, lr=0.0)["loss"]
        assert (loss < 1e-5) == (which == "current")
    assert np.array_equal(flat(role.logprobs(batch), "logprobs"), flat(now, "logprobs"))


@pytest.mark.parametrize("settings", [{"reference": "initial"}, {"tuner_type": "lora", "lora_targets": ["q_proj"]}])
def test_states_go_through_the_bias_of_their_own_head(hf: Start, others: Path, settings: dict[str, Any]) -> None:
    from roles.train.teaching import teacher_states

    role, batch = hf("phi", lr=0.1, **settings), make_batch(6, 0)
    role.average_weights(0.5)
    for moved in (False, True):
        for which in ("current", "initial", "average"):
            taught = role.teach(batch, weights=which, hidden=True, topk=VOCAB, temperature=1.0)
            states = teacher_states(batch.merge(taught), HeadInfo(VOCAB, SIZES["hidden_size"], "float32"))
            head = role._trainer.passes.head_of(which)
            assert head.bias is not None
            tables = torch.log_softmax(states @ head.weight.float().T + head.bias.float(), -1)
            labels = torch.from_numpy(flat(batch, "response_ids").astype(np.int64))[:, None]
            expected = flat(taught, "teacher_token_logprobs")
            assert np.abs(tables.gather(-1, labels)[:, 0].numpy() - expected).max() < 1e-4
            role.use_teacher_head(which)
            loss = role.step(batch.merge(taught), loss=DISTILL, lr=0.0)["loss"]
            assert loss < 1e-5 or (moved and which != "current"), which
        role.step(batch, loss=NLL)


# ----- weights on their way out, memory -----


def test_sends_what_the_manifest_says(hf: Start) -> None:
    from rolegraph.wire import WeightReceiver

    role = hf()
    role.step(make_batch(8, 0), loss=NLL)
    group = TransferGroup("gloo", *role.rendezvous(), 2, {0: 1}, 30.0)
    received: dict[str, torch.Tensor] = {}

    def receive() -> None:
        receiver = WeightReceiver(group, 1)
        for name, tensor in receiver.receive(role.weight_manifest()):
            received[name] = tensor.clone()
        receiver.close()

    thread = threading.Thread(target=receive)
    thread.start()
    role.connect_weights(group)
    assert role.send_weights(10_000) > 0
    thread.join(timeout=30)
    role.disconnect_weights()
    assert list(received) == [info.name for info in role.weight_manifest()]
    assert "lm_head.weight" not in received, "it is the embedding"
    assert all(torch.equal(received[name], tensor) for name, tensor in weights(role).items())


def test_turns_change_no_number(hf: Start) -> None:
    from roles.train.huggingface_model import held

    seen = []
    for moves in (False, True):
        role = hf(reference="initial", micro_batch_size=3)
        role._offload = Offload(role._policy, moves=True, held=held)
        losses = []
        for seed in range(3):
            if moves:
                assert role._offload.give(model=True, optimizer=True) > 0
                with pytest.raises(TurnError, match="model is offloaded"):
                    role.logprobs(make_batch(4, 0))
                role.onload(model=True, optimizer=True)
            losses.append(role.step(make_batch(8, seed), loss=NLL)["loss"])
        seen.append((losses, flat(role.logprobs(make_batch(8, 0), reference=True), "ref_logprobs").tolist()))
    assert seen[0] == seen[1]


# ----- what is refused -----


def test_refuses_logits_that_are_more_than_a_projection(hf: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    plain = Qwen3ForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits + torch.arange(VOCAB)
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", forward)
    with pytest.raises(ConfigError, match=r"logits of .*Qwen3ForCausalLM are not a projection"):
        hf()


def test_refuses_to_pack_where_the_model_does_not_tell_rows_apart(
    hf: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(folder / "bloom")
    assert hf("bloom").logprobs(make_batch(4, 0)) is not None
    with pytest.raises(ConfigError, match="BloomForCausalLM takes no positions, by which packed rows are told apart"):
        hf("bloom", padding_free=True)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(ConfigError, match=r"does not tell packed rows apart .*: set it to false"):
        hf(padding_free=True)
    # Where nobody asked for it, as flash-attention would pack them, they are padded.
    expected = flat(hf().logprobs(make_batch(6, 0)), "logprobs")
    monkeypatch.setattr("roles.train.huggingface_model._packs", lambda config, model: True)
    with caplog.at_level("INFO"):
        found = flat(hf(micro_batch_size=3).logprobs(make_batch(6, 0)), "logprobs")
    assert np.abs(found - expected).max() < 1e-5
    assert "rows are padded: " in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 0}, r"train\.micro_batch_size=0 must be 1 or more"),
        ({"min_lr": 1.0}, r"train\.min_lr=1\.0 is above train\.lr"),
        ({"lora_rank": 4}, r"train\.lora_rank has no effect with train\.tuner_type=full"),
    ],
)
def test_refuses(settings: dict[str, Any], message: str) -> None:
    (found,) = HuggingFaceTrainConfig(**settings).problems()
    assert re.search(message, found)


def test_the_ranks_of_a_host_share_the_pages_of_the_files_they_read(tmp_path: Path) -> None:
    """No rank has a whole copy of its own before it keeps its part: weights are mapped, not read."""
    from roles.train.huggingface_model import _load

    config = HuggingFaceTrainConfig(model=make_checkpoint(tmp_path, "qwen3"), dtype="bfloat16")
    model = _load(config, on_gpu=False)
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [region[0].split("-") for region in regions if region[-1].startswith(str(tmp_path))]
    mapped = [range(int(start, 16), int(end, 16)) for start, end in ours]
    read = [name for name, param in model.named_parameters() if not any(param.data_ptr() in each for each in mapped)]
    assert read == []
