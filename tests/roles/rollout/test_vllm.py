"""VLLMRollout on a tiny model: one engine for the whole module, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rolegraph.batch import Batch
from rolegraph.errors import BatchError, ConfigError, TurnError, WeightSyncError
from rolegraph.interfaces import SamplingParams
from rolegraph.role import RoleContext
from roles.rollout.decoding import Decoding, Work
from roles.rollout.drawing import sample_seed
from roles.rollout.huggingface import HuggingFaceRollout
from roles.rollout.huggingface_config import HuggingFaceRolloutConfig
from tests.models import add_tokenizer, make_checkpoint
from tests.roles.rollout.replica import (
    QKV,
    breaking,
    checkpoint_tensors,
    ids_of,
    logprob_error,
    manifest_of,
    push,
    refuses_when_no_sync_comes,
    replica,
    sits_out_a_broken_sync,
    some_tokens_s,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL_IDS, TOKENIZER_IDS = 400, 300
ENDS = [1, *range(100, 130)]
"""Ids that end a response; many, so that random models meet one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models of one shape; the vocabulary is wider than the tokenizer's."""
    made = []
    for seed in range(3):
        folder = tmp_path_factory.mktemp("model") / str(seed)
        made.append(make_checkpoint(folder, "qwen3", vocab_size=MODEL_IDS, seed=seed, initializer_range=0.1))
        add_tokenizer(folder, TOKENIZER_IDS, eos=ENDS)
    return made


@pytest.fixture(scope="module")
def role(folders: list[str]) -> Iterator[Any]:
    with replica(model=folders[0]) as running:
        yield running


def prompts(rows: int = 4, length: int = 70) -> Batch:
    draw = np.random.default_rng(0)
    return Batch.from_columns(
        {
            "uid": [f"row-{i}" for i in range(rows)],
            "prompt_ids": [draw.integers(130, 300, length + i).tolist() for i in range(rows)],
            "answer": [f"answer {i}" for i in range(rows)],
        }
    )


SAMPLING = SamplingParams(n=2, temperature=0.7, max_tokens=24, seed=3)


@pytest.fixture
def fresh(role: Any, folders: list[str]) -> int:
    """The first model's weights in the engine, whatever the test before left; gives their version."""
    tensors = checkpoint_tensors(folders[0])
    version = 100
    push(role, tensors.items(), manifest_of(tensors), version)
    return version


def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(role: Any, fresh: int, folders: list[str]) -> None:
    batch = role.generate(prompts(), SAMPLING)
    assert logprob_error(folders[0], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4


def test_transformers_draws_and_scores_alike(role: Any, fresh: int, folders: list[str]) -> None:
    """`rollout=huggingface` beside this engine: greedy samples are the same, and what one draws the other scores so."""
    other = HuggingFaceRollout(HuggingFaceRolloutConfig(model=folders[0]), RoleContext(role="rollout", threads=2))
    other.setup()
    greedy = replace(SAMPLING, temperature=0.0, seed=None)
    one, two = role.generate(prompts(), greedy), other.generate(prompts(), greedy)
    assert ids_of(one) == ids_of(two)
    assert one["finish_reason"].equals(two["finish_reason"])
    assert distance(one.lists("rollout_logprobs"), two.lists("rollout_logprobs")) < 1e-4
    drawn = role.generate(prompts(), replace(SAMPLING, ignore_eos=True))
    assert distance(drawn.lists("rollout_logprobs"), scored_step_by_step(other, drawn)) < 1e-4


def distance(one: Any, other: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def scored_step_by_step(role: Any, batch: Batch) -> list[np.ndarray[Any, Any]]:
    """The logprobs of a batch's samples, all of one length, as the loop that draws has them."""
    engine, responses = role._engine, np.stack(batch.lists("response_ids"))

    class Given:
        def __call__(self, logits: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = (logits[:, :TOKENIZER_IDS] / SAMPLING.temperature).log_softmax(-1)
            return numbers.long(), scores.gather(1, numbers.long()[:, None])[:, 0]

    asked = [prompt.tolist() for prompt in batch.lists("prompt_ids")]
    work = Work(asked, range(len(asked)), responses.astype(np.float64), ends=[])
    given: Any = Given()
    samples = Decoding(engine._forward, engine.weights, given, work, lambda: engine._room_for(work)).run(
        lambda: True, lambda _: None
    )
    assert [list(sample.token_ids) for sample in samples] == responses.tolist()
    return [np.asarray(sample.logprobs) for sample in samples]


def test_the_columns_of_a_generation(role: Any, fresh: int) -> None:
    given = prompts(3)
    batch = role.generate(given, replace(SAMPLING, step=7))
    batch.check_alignment()
    assert len(batch) == 6
    assert batch["uid"].to_pylist() == ["row-0", "row-0", "row-1", "row-1", "row-2", "row-2"]
    assert batch["answer"].to_pylist()[2:4] == ["answer 1"] * 2
    assert batch.numpy("repeat").tolist() == [0, 1] * 3
    assert set(batch.numpy("step")) == {7}
    assert set(batch.numpy("weight_version")) == set(batch.numpy("weight_version_last")) == {fresh}
    lengths = [len(row) for row in ids_of(batch)]
    assert batch.numpy("response_length").tolist() == lengths
    assert (batch.numpy("length") - batch.numpy("prompt_length")).tolist() == lengths
    assert all((mask == 1).all() for mask in batch.lists("response_mask"))
    types = {name: batch[name].type for name in batch.column_names}
    assert types["response_ids"] == pa.list_(pa.int32())
    assert types["response_mask"] == pa.list_(pa.uint8())
    assert types["rollout_logprobs"] == pa.list_(pa.float32())
    assert types["weight_version"] == pa.int64()
    assert types["repeat"] == types["response_length"] == types["length"] == pa.int32()
    assert len(role.generate(given.slice(0, 0), SAMPLING)) == 0


def test_seeds_name_a_sample_wherever_it_is_drawn(role: Any, fresh: int) -> None:
    given = prompts(4)
    whole = ids_of(role.generate(given, SAMPLING))
    parts = [row for i in (3, 1, 0, 2) for row in ids_of(role.generate(given.slice(i, i + 1), SAMPLING))]
    assert parts == [row for i in (3, 1, 0, 2) for row in whole[2 * i : 2 * i + 2]]
    assert len({tuple(row) for row in whole}) == len(whole)
    assert ids_of(role.generate(given, replace(SAMPLING, n=3)))[0:2] == whole[0:2]
    assert ids_of(role.generate(given, replace(SAMPLING, step=1))) != whole
    assert ids_of(role.generate(given, replace(SAMPLING, seed=4))) != whole
    free = replace(SAMPLING, seed=None)
    assert ids_of(role.generate(given, free)) != ids_of(role.generate(given, free))


def test_sample_seeds_differ_in_every_part_and_fit_63_bits() -> None:
    seeds = [sample_seed(s, u, t, r) for s in range(3) for u in ("a", "b", "1") for t in range(3) for r in range(3)]
    assert len(set(seeds)) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ids_the_tokenizer_lacks_are_never_drawn(role: Any, fresh: int) -> None:
    batch = role.generate(prompts(8), SamplingParams(n=4, temperature=2.0, max_tokens=64, seed=1, ignore_eos=True))
    drawn = np.concatenate(batch.lists("response_ids"))
    assert len(drawn) == 8 * 4 * 64
    assert drawn.max() < TOKENIZER_IDS
    assert drawn.max() > 250


def test_every_end_id_ends_a_response_and_stays_in_it(role: Any, fresh: int) -> None:
    batch = role.generate(prompts(8), replace(SAMPLING, temperature=1.5, max_tokens=48, n=4))
    reasons = batch["finish_reason"].to_pylist()
    seen = set()
    for row, reason in zip(ids_of(batch), reasons, strict=True):
        assert not set(row[:-1]) & set(ENDS)
        assert (row[-1] in ENDS) == (reason == "stop")
        assert reason == "stop" or len(row) == 48
        seen.add(row[-1])
    assert len(seen & set(ENDS)) > 1, "the test needs several ends"
    longer = role.generate(prompts(8), replace(SAMPLING, temperature=1.5, max_tokens=48, n=4, ignore_eos=True))
    assert set(longer["finish_reason"].to_pylist()) == {"length"}
    own = role.generate(prompts(4), replace(SAMPLING, ignore_eos=True, stop_token_ids=tuple(range(200, 300))))
    assert all(
        row[-1] >= 200 for row, why in zip(ids_of(own), own["finish_reason"].to_pylist(), strict=True) if why == "stop"
    )
    assert "stop" in own["finish_reason"].to_pylist()


def test_concurrent_calls_get_what_they_would_get_alone(role: Any, fresh: int) -> None:
    given = prompts(8)
    alone = [ids_of(role.generate(given.slice(i, i + 1), SAMPLING)) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: ids_of(role.generate(given.slice(i, i + 1), SAMPLING)), range(8)))
    assert together == alone


def test_abort_returns_the_rows_with_what_they_have(role: Any, fresh: int) -> None:
    long = SamplingParams(n=3, max_tokens=180, ignore_eos=True, seed=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(role.generate, prompts(2, length=20), long)
        time.sleep(0.1)
        while not (stopped := role.abort()) and not running.done():
            time.sleep(0.02)
        batch = running.result(60)
    assert stopped == 6
    assert batch["finish_reason"].to_pylist() == ["abort"] * 6
    assert batch.numpy("response_length").max() < 180
    batch.check_alignment()
    assert role.abort() == 0


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([130] * 200, SAMPLING, ["row-x", "200 tokens"]),
        ([130] * 250, SAMPLING, ["row-x", "250 tokens", "max_tokens=24", "max_model_len=256"]),
        ([], SAMPLING, ["row-x", "empty"]),
        ([5, MODEL_IDS], SAMPLING, ["row-x", f"token id {MODEL_IDS}", f"end at {MODEL_IDS - 1}"]),
        ([5], replace(SAMPLING, n=0), ["n=0"]),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(role: Any, ids: list[int], sampling: Any, words: list[str]) -> None:
    batch = Batch.from_columns({"uid": ["row-x"], "prompt_ids": pa.array([ids], pa.list_(pa.int32()))})
    if "200 tokens" in words:
        assert len(role.generate(batch, sampling)) == 2
        return
    with pytest.raises(BatchError) as caught:
        role.generate(batch, sampling)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.timeout(300)
def test_an_unknown_engine_argument_is_named_with_the_nearest(folders: list[str]) -> None:
    with (
        pytest.raises(ConfigError, match=r"engine_kwargs.max_logprob: .*did you mean max_logprobs"),
        replica(model=folders[0], engine_kwargs={"max_logprob": 1}),
    ):
        pass


def test_a_sync_changes_the_weights_and_forgets_cached_prompts(role: Any, fresh: int, folders: list[str]) -> None:
    before = role.generate(prompts(), SAMPLING)  # fills the prefix cache with these prompts
    tensors = checkpoint_tensors(folders[1])
    push(role, tensors.items(), manifest_of(tensors), 5)
    after = role.generate(prompts(), SAMPLING)
    assert logprob_error(folders[1], after, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    assert logprob_error(folders[0], after, temperature=0.7, ids=TOKENIZER_IDS) > 0.1
    assert set(after.numpy("weight_version")) == {5}
    assert set(before.numpy("weight_version")) == {fresh}


def test_a_sync_in_the_middle_of_a_generation_dates_its_rows(role: Any, fresh: int, folders: list[str]) -> None:
    tensors = checkpoint_tensors(folders[1])
    long = SamplingParams(n=15, max_tokens=200, ignore_eos=True, seed=1)
    begins_s = some_tokens_s(role, prompts(2, length=30), long)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(role.generate, prompts(2, length=30), long)
        time.sleep(begins_s)
        push(role, tensors.items(), manifest_of(tensors), fresh + 1)
        batch = running.result(60)
    assert set(batch.numpy("weight_version")) == {fresh}
    assert set(batch.numpy("weight_version_last")) == {fresh + 1}
    assert set(batch.numpy("response_length")) == {200}


def test_weights_of_another_model_are_refused_before_any_is_loaded(role: Any, fresh: int, folders: list[str]) -> None:
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
            push(role, tensors.items(), manifest, 6)
        batch = role.generate(prompts(), SAMPLING)
        assert logprob_error(folders[0], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    push(role, tensors.items(), good, 6)
    assert logprob_error(folders[1], role.generate(prompts(), SAMPLING), temperature=0.7, ids=TOKENIZER_IDS) < 1e-4


@pytest.mark.parametrize("fault", ["misshapen", "missing", "dies"])
def test_samples_sit_out_a_sync_that_breaks_half_way(role: Any, fresh: int, folders: list[str], fault: str) -> None:
    sits_out_a_broken_sync(role, folders, fault, 7, TOKENIZER_IDS)


def test_a_sync_that_breaks_half_way_is_named_when_no_other_comes(role: Any, fresh: int, folders: list[str]) -> None:
    refuses_when_no_sync_comes(role, folders, 7)


def test_an_engine_asleep_refuses_and_wakes_with_the_weights_it_kept(role: Any, fresh: int, folders: list[str]) -> None:
    before = role.generate(prompts(), SAMPLING)
    role.sleep(0)
    role.sleep(1)
    role.sleep(1)
    with pytest.raises(TurnError, match=r"asleep \(weights, kv_cache\).*self\.turn"):
        role.generate(prompts(), SAMPLING)
    role.wake_up(("weights",))
    with pytest.raises(TurnError, match=r"asleep \(kv_cache\)"):
        role.generate(prompts(), SAMPLING)
    role.wake_up(("weights", "kv_cache"))
    assert ids_of(role.generate(prompts(), SAMPLING)) == ids_of(before)


def test_weights_dropped_by_a_deep_sleep_are_synced_before_samples_are_drawn(
    role: Any, fresh: int, folders: list[str]
) -> None:
    tensors = checkpoint_tensors(folders[1])
    role.sleep(2)
    with pytest.raises(
        TurnError, match=r"weights were dropped by sleep\(level=2\).*sync before generate.*sleep_level=1"
    ):
        role.generate(prompts(), SAMPLING)
    with pytest.raises(TurnError, match=r"weights are asleep.*wake_up\(\('weights',\)\) before a sync"):
        push(role, tensors.items(), manifest_of(tensors), fresh + 1)
    role.wake_up(("weights",))
    with pytest.raises(WeightSyncError, match="missing"):
        push(role, tensors.items(), manifest_of(tensors)[1:], fresh + 1)
    role.wake_up(("weights", "kv_cache"))
    with pytest.raises(TurnError, match="no sync has brought them back"):
        role.generate(prompts(), SAMPLING)
    push(role, tensors.items(), manifest_of(tensors), fresh + 1)
    batch = role.generate(prompts(), SAMPLING)
    assert logprob_error(folders[1], batch, temperature=0.7, ids=TOKENIZER_IDS) < 1e-4
    assert set(batch.numpy("weight_version")) == {fresh + 1}


def test_no_sleep_while_samples_are_drawn(role: Any, fresh: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = SamplingParams(n=15, max_tokens=180, ignore_eos=True, seed=1)
        running = pool.submit(role.generate, prompts(2, length=20), long)
        time.sleep(0.1)
        with pytest.raises(TurnError, match="30 samples are being drawn"):
            role.sleep(2)
        assert set(running.result(60)["finish_reason"].to_pylist()) == {"length"}
    assert len(role.generate(prompts(2), SAMPLING)) == 4


def test_two_tensor_parallel_workers_with_a_tied_head(tmp_path: Path) -> None:
    paths = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        paths.append(make_checkpoint(folder, "qwen3", tied=True, vocab_size=320, seed=seed, initializer_range=0.1))
        add_tokenizer(folder, 320)
    with replica(model=paths[0], tensor_parallel_size=2) as role:
        first = role.generate(prompts(), SAMPLING)
        assert logprob_error(paths[0], first, temperature=0.7) < 1e-4
        tensors = checkpoint_tensors(paths[1])
        assert "lm_head.weight" not in tensors
        manifest = manifest_of(tensors)
        push(role, tensors.items(), manifest, 1)
        second = role.generate(prompts(), SAMPLING)
        assert logprob_error(paths[1], second, temperature=0.7) < 1e-4

        with pytest.raises(WeightSyncError, match=QKV):
            push(role, breaking(tensors, "misshapen"), manifest, 2)
        push(role, tensors.items(), manifest, 3)
        third = role.generate(prompts(), SAMPLING)
        assert ids_of(third) == ids_of(second)
        assert set(third.numpy("weight_version")) == {3}
