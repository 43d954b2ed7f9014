"""HuggingFaceRollout on tiny models, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")

from rolegraph.batch import Batch  # noqa: E402
from rolegraph.errors import BatchError, ConfigError, TurnError, WeightSyncError  # noqa: E402
from rolegraph.interfaces import AdapterInfo, SamplingParams  # noqa: E402
from rolegraph.role import RoleContext  # noqa: E402
from roles.rollout import decoding  # noqa: E402
from roles.rollout.huggingface import HuggingFaceRollout  # noqa: E402
from roles.rollout.huggingface_config import HuggingFaceRolloutConfig  # noqa: E402
from tests.models import add_tokenizer, make_checkpoint  # noqa: E402
from tests.roles.rollout.replica import (  # noqa: E402
    QKV,
    checkpoint_tensors,
    ids_of,
    logprob_error,
    manifest_of,
    prompts,
    push,
    refuses_when_no_sync_comes,
    sits_out_a_broken_sync,
    some_tokens_s,
)

pytestmark = pytest.mark.engine

MODEL_IDS, TOKENIZER_IDS = 400, 300
ENDS = [1, *range(100, 110)]
SAMPLING = SamplingParams(n=3, temperature=0.7, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one shape; the vocabulary is wider than the tokenizer's."""
    made = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("model")
        made.append(make_checkpoint(folder, "qwen3", vocab_size=MODEL_IDS, seed=seed, initializer_range=0.1))
        add_tokenizer(folder, TOKENIZER_IDS, eos=ENDS)
    return made


@contextmanager
def rollout(folder: str, **settings: Any) -> Iterator[Any]:
    config = HuggingFaceRolloutConfig(model=folder, **{"max_model_len": 256} | settings)
    role = HuggingFaceRollout(config, RoleContext(role="rollout", threads=2))
    role.setup()
    yield role
    role.teardown()


@pytest.fixture(scope="module")
def running(folders: list[str]) -> Iterator[Any]:
    with rollout(folders[0]) as role:
        yield role


@pytest.fixture
def role(running: Any, folders: list[str]) -> Any:
    """The first model's weights in the engine, as version 100, whatever the test before left."""
    tensors = checkpoint_tensors(folders[0])
    push(running, tensors.items(), manifest_of(tensors), 100)
    return running


def distance(one: Batch, other: Batch) -> float:
    """Between the logprobs of the same samples."""
    pairs = zip(one.lists("rollout_logprobs"), other.lists("rollout_logprobs"), strict=True)
    return max(float(np.abs(a - b).max(initial=0)) for a, b in pairs)


@contextmanager
def passes(role: Any) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each forward pass."""
    found: list[tuple[int, int]] = []
    hook = role._engine.model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: found.append(tuple(inputs[0].shape))
    )
    yield found
    hook.remove()


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(role: Any, folders: list[str]) -> None:
    batch = role.generate(prompts(), SAMPLING)
    assert logprob_error(folders[0], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4


def test_the_columns_of_a_generation(role: Any) -> None:
    batch = role.generate(prompts(3), replace(SAMPLING, step=7))
    batch.check_alignment()
    assert batch["uid"].to_pylist() == ["row-0"] * 3 + ["row-1"] * 3 + ["row-2"] * 3
    assert batch["repeat"].to_pylist() == [0, 1, 2] * 3
    assert batch["answer"].to_pylist() == [0] * 3 + [1] * 3 + [2] * 3
    assert set(batch.numpy("step")) == {7}
    assert set(batch.numpy("weight_version")) == set(batch.numpy("weight_version_last")) == {100}
    lengths = [len(row) for row in ids_of(batch)]
    assert (batch.numpy("length") - batch.numpy("prompt_length")).tolist() == lengths
    assert batch["response_ids"].type == pa.list_(pa.int32())
    for row, reason in zip(ids_of(batch), batch["finish_reason"].to_pylist(), strict=True):
        assert not set(row[:-1]) & set(ENDS)
        assert (row[-1] in ENDS) == (reason == "stop")
        assert reason == "stop" or len(row) == 12
    assert len(role.generate(prompts().slice(0, 0), SAMPLING)) == 0


@pytest.mark.parametrize("settings", [{"max_num_seqs": 4}, {"cache": "static"}, {"kv_cache_bytes": 1}])
def test_a_sample_does_not_depend_on_its_batch(role: Any, folders: list[str], settings: dict[str, Any]) -> None:
    whole = role.generate(prompts(), SAMPLING)
    assert len({tuple(row) for row in ids_of(whole)}) == len(whole)
    with rollout(folders[0], **settings) as other, passes(other) as seen:
        again = other.generate(prompts(), SAMPLING)
    assert ids_of(again) == ids_of(whole)
    assert distance(again, whole) < 1e-5
    assert max(rows for rows, _ in seen) == {"max_num_seqs": 4, "cache": 15, "kv_cache_bytes": 1}[next(iter(settings))]
    alone = [row for i in (3, 0) for row in ids_of(role.generate(prompts().slice(i, i + 1), SAMPLING))]
    assert alone == [*ids_of(whole)[9:12], *ids_of(whole)[0:3]]


def test_seeds_make_the_draws_and_nothing_else_does(role: Any) -> None:
    whole = role.generate(prompts(), SAMPLING)
    again = role.generate(prompts(), SAMPLING)
    assert again["rollout_logprobs"].equals(whole["rollout_logprobs"])
    assert ids_of(role.generate(prompts(), replace(SAMPLING, n=4)))[0:3] == ids_of(whole)[0:3]
    assert ids_of(role.generate(prompts(), replace(SAMPLING, step=1))) != ids_of(whole)
    free = replace(SAMPLING, seed=None)
    assert ids_of(role.generate(prompts(), free)) != ids_of(role.generate(prompts(), free))


def test_cuts_renormalise_and_temperature_0_is_greedy(role: Any, folders: list[str], caplog: Any) -> None:
    greedy = role.generate(prompts(), replace(SAMPLING, temperature=0.0, seed=None))
    assert ids_of(greedy)[0] == ids_of(greedy)[1]
    assert logprob_error(folders[0], greedy, temperature=1.0, ids=TOKENIZER_IDS) < 1e-4
    narrow = role.generate(prompts(), replace(SAMPLING, temperature=1.3, top_k=1))
    assert ids_of(narrow) == ids_of(greedy)
    assert max(abs(value) for row in narrow.lists("rollout_logprobs") for value in row) < 1e-6
    assert "cut the distribution" in caplog.text


def test_ids_the_tokenizer_lacks_are_never_drawn(role: Any) -> None:
    hot = SamplingParams(n=8, temperature=2.0, max_tokens=24, seed=1, ignore_eos=True)
    drawn = np.concatenate(role.generate(prompts(), hot).lists("response_ids"))
    assert len(drawn) == 5 * 8 * 24
    assert 250 < drawn.max() < TOKENIZER_IDS


def test_a_prompt_is_computed_once_and_what_has_ended_costs_nothing(role: Any) -> None:
    sampling = replace(SAMPLING, ignore_eos=True, stop_token_ids=tuple(range(200, 300)), max_tokens=20)
    with passes(role) as seen:
        batch = role.generate(prompts(4), sampling)
    lengths = batch.numpy("response_length")
    assert 1 < lengths.min() + 1 < lengths.max(), "the test needs samples of different lengths"
    assert seen[0] == (4, 19)
    assert seen[1:] == [(int((lengths > step).sum()), 1) for step in range(1, int(lengths.max()))]
    assert all(
        row[-1] >= 200
        for row, why in zip(ids_of(batch), batch["finish_reason"].to_pylist(), strict=True)
        if why == "stop"
    )


def test_long_prompts_are_computed_in_parts(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = role.generate(prompts(), SAMPLING)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 50)
    with passes(role) as seen:
        parts = role.generate(prompts(), SAMPLING)
    assert seen[:3] == [(2, 24), (2, 24), (1, 24)]
    assert ids_of(parts) == ids_of(whole)
    assert distance(parts, whole) < 1e-5


def test_the_memory_of_a_batch_is_taken_once(role: Any) -> None:
    role._engine._room = None
    role.generate(prompts(), SAMPLING)
    room = role._engine._room
    assert (room.rows, room.length) == (15, 24 + 12)
    layers = [layer.keys for layer in room.cache.layers]
    assert [tuple(keys.shape) for keys in layers] == [(15, 2, 36, 32)] * 2
    role.generate(prompts(4), SAMPLING)
    assert role._engine._room is room
    assert all(layer.keys is keys for layer, keys in zip(room.cache.layers, layers, strict=True))
    role.generate(prompts(), replace(SAMPLING, max_tokens=13))
    assert role._engine._room is not room


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([130] * 250, SAMPLING, ["row-x", "250 tokens", "max_tokens=12", "max_model_len=256", "rollout.max_model_len"]),
        ([], SAMPLING, ["row-x", "empty"]),
        ([5, MODEL_IDS], SAMPLING, ["row-x", f"token id {MODEL_IDS}", f"end at {MODEL_IDS - 1}"]),
        ([5], replace(SAMPLING, n=0), ["n=0"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(role: Any, ids: list[int], sampling: Any, words: list[str]) -> None:
    batch = Batch.from_columns({"uid": ["row-x"], "prompt_ids": pa.array([ids], pa.list_(pa.int32()))})
    with pytest.raises(BatchError) as caught:
        role.generate(batch, sampling)
    assert all(word in str(caught.value) for word in words), caught.value


def test_abort_returns_the_rows_with_what_they_have(role: Any, folders: list[str]) -> None:
    long = SamplingParams(n=3, max_tokens=230, ignore_eos=True, seed=1)
    with rollout(folders[0], max_num_seqs=4) as other, ThreadPoolExecutor(1) as pool:
        generating = pool.submit(other.generate, prompts(2), long)
        time.sleep(0.1)
        with pytest.raises(TurnError, match="6 samples are being drawn"):
            other.sleep(1)
        assert other.abort() == 6
        batch = generating.result(60)
        assert batch["finish_reason"].to_pylist() == ["abort"] * 6
        lengths = batch.numpy("response_length")
        assert sorted(lengths)[:2] == [0, 0], "two waited for the others"
        assert 0 < lengths.max() < 230
        batch.check_alignment()
        assert other.abort() == 0
        assert set(other.generate(prompts(2), long)["finish_reason"].to_pylist()) == {"length"}


@pytest.mark.parametrize("version", [100, 101])
def test_a_sync_in_the_middle_of_a_generation_changes_the_tokens_that_follow(
    role: Any, folders: list[str], version: int
) -> None:
    """Also under the version it had: what a replica gets when another was started again can be newer."""
    tensors = checkpoint_tensors(folders[1])
    long = SamplingParams(n=2, max_tokens=220, ignore_eos=True, seed=1)
    begins_s = some_tokens_s(role, prompts(2), long)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(role.generate, prompts(2), long)
        time.sleep(begins_s)
        push(role, tensors.items(), manifest_of(tensors), version)
        batch = generating.result(60)
    assert set(batch.numpy("weight_version")) == {100}
    assert set(batch.numpy("weight_version_last")) == {version}
    whole = [list(each) for each in zip(ids_of(batch), batch.lists("rollout_logprobs"), strict=True)]

    def part(first: int, last: int) -> Batch:
        """The samples' tokens from `first` to `last`, what comes before them counted as their prompt."""
        before = [
            [*prompt.tolist(), *ids[:first]] for prompt, (ids, _) in zip(batch.lists("prompt_ids"), whole, strict=True)
        ]
        return Batch.from_columns(
            {
                "prompt_ids": before,
                "response_ids": [ids[first:last] for ids, _ in whole],
                "rollout_logprobs": [values[first:last].astype(np.float32) for _, values in whole],
            }
        )

    assert logprob_error(folders[0], part(0, 2), temperature=1.0, ids=TOKENIZER_IDS) < 1e-4
    assert logprob_error(folders[1], part(218, 220), temperature=1.0, ids=TOKENIZER_IDS) < 1e-4


def test_weights_of_another_model_are_refused_before_any_is_loaded(role: Any, folders: list[str]) -> None:
    tensors = checkpoint_tensors(folders[1])
    good = manifest_of(tensors)
    wrong = [replace(info, shape=(3, 3)) if info.name == QKV else info for info in good]
    cases = [
        (wrong, rf"{QKV} has shape \[3, 3\], the model wants \[128, 64\]"),
        ([info for info in good if info.name != QKV], f"missing {QKV}"),
        ([*good, replace(good[0], name="other.weight")], "unknown other.weight"),
    ]
    for manifest, message in cases:
        with pytest.raises(WeightSyncError, match=message):
            push(role, tensors.items(), manifest, 101)
        batch = role.generate(prompts(2), SAMPLING)
        assert logprob_error(folders[0], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    with pytest.raises(WeightSyncError, match="rollout was started without room for an adapter"):
        HuggingFaceRollout.receive_weights(role, good, 1, 101, adapter=AdapterInfo(4, 8.0, ("q_proj",)))
    with pytest.raises(WeightSyncError, match="not connected to a trainer"):
        role.receive_weights(good, 1, 101)


@pytest.mark.parametrize("fault", ["misshapen", "missing", "dies"])
def test_samples_sit_out_a_sync_that_breaks_half_way(role: Any, folders: list[str], fault: str) -> None:
    sits_out_a_broken_sync(role, folders, fault, 101, TOKENIZER_IDS)


def test_a_sync_that_breaks_half_way_is_named_when_no_other_comes(role: Any, folders: list[str]) -> None:
    refuses_when_no_sync_comes(role, folders, 101)


def test_asleep_it_refuses_and_wakes_with_the_weights_it_kept(role: Any) -> None:
    before = role.generate(prompts(2), SAMPLING)
    role.sleep(0)
    role.sleep(1)
    with pytest.raises(TurnError, match=r"asleep \(weights, kv_cache\)"):
        role.generate(prompts(2), SAMPLING)
    role.wake_up(("weights",))
    with pytest.raises(TurnError, match=r"asleep \(kv_cache\)"):
        role.generate(prompts(2), SAMPLING)
    role.wake_up(("kv_cache",))
    assert ids_of(role.generate(prompts(2), SAMPLING)) == ids_of(before)


def test_weights_dropped_by_a_deep_sleep_are_synced_before_samples_are_drawn(role: Any, folders: list[str]) -> None:
    tensors = checkpoint_tensors(folders[1])
    manifest = manifest_of(tensors)
    role.sleep(2)
    assert not any(weight.numel() for weight in role._engine.model.parameters())
    with pytest.raises(TurnError, match=r"weights were dropped by sleep\(level=2\)"):
        role.generate(prompts(), SAMPLING)
    with pytest.raises(TurnError, match=r"weights are asleep.*wake_up\(\('weights',\)\) before a sync"):
        push(role, tensors.items(), manifest, 101)
    role.wake_up(("weights", "kv_cache"))
    with pytest.raises(TurnError, match="no sync has brought them back"):
        role.generate(prompts(), SAMPLING)
    push(role, tensors.items(), manifest, 101)
    batch = role.generate(prompts(), SAMPLING)
    assert logprob_error(folders[1], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen2", {"tied": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_models_of_other_kinds_take_weights_too(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Experts, which transformers keeps in one tensor; a tied head; layers whose cache is a window, not all tokens."""
    made = []
    for seed in range(2):
        made.append(make_checkpoint(tmp_path / str(seed), kind, seed=seed, vocab_size=320, **changes))
        add_tokenizer(made[-1], 320)
    tensors = checkpoint_tensors(made[1])
    long = replace(SAMPLING, max_tokens=40, ignore_eos=True)
    with rollout(made[0]) as role, ThreadPoolExecutor(1) as pool:
        assert logprob_error(made[0], role.generate(prompts(), long), temperature=0.7) < 1e-4
        generating = pool.submit(role.generate, prompts(), replace(long, max_tokens=200))
        time.sleep(0.1)
        push(role, tensors.items(), manifest_of(tensors), 1)
        assert set(generating.result(60).numpy("weight_version_last")) == {1}
        assert logprob_error(made[1], role.generate(prompts(), long), temperature=0.7) < 1e-4


def test_a_model_with_a_cache_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "vocab_size": 10}')
    with pytest.raises(ConfigError, match=r"rollout.model=.*models of type rwkv have a cache of their own"):
        rollout(str(tmp_path)).__enter__()
