"""Groups of real Ray actors: dispatch, collect, lanes, errors, queues, and where heavy columns stay."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import rolegraph.batch
import rolegraph.group
from rolegraph.batch import Batch
from rolegraph.errors import BatchError, RoleError, RoleGraphError
from rolegraph.graph import GraphOptions, RoleGraph
from rolegraph.group import group_of
from rolegraph.role import Mesh
from tests.rolegraph.fakes import Fake, Plain, batch_of, is_running, plan_of, spec_of, wait_gone

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def graph(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleGraph]:
    options = GraphOptions(run_dir=str(tmp_path_factory.mktemp("run")), exp_name="group", seed=7)
    with RoleGraph(plan_of(ranks=2), {"fake": spec_of(Fake, {"key": 1})}, options) as graph:
        yield graph


@pytest.fixture
def fake(graph: RoleGraph) -> Fake:
    return graph.handle("fake", Fake)


async def test_collects_of_the_table(fake: Fake) -> None:
    assert await fake.noop() == [None, None]
    assert await fake.rank() == [0, 1]
    assert await fake.first_rank([1, 2]) == (0, [1, 2])
    assert await fake.doubled([1, 2, 3], plus=1) == [3, 5, 7]
    assert await fake.doubled([5]) == [10]
    assert await fake.doubled([]) == []
    assert await group_of(fake).rank(1).rank() == [1]


def test_sync_gives_the_same_without_an_event_loop(fake: Fake) -> None:
    assert fake.rank.sync() == [0, 1]
    assert fake.doubled.sync([1, 2, 3]) == [2, 4, 6]
    with pytest.raises(RoleGraphError, match=r"rank\(\) was called without an event loop: call rank.sync"):
        fake.rank()


async def test_sync_inside_a_loop_is_refused(fake: Fake) -> None:
    with pytest.raises(RoleGraphError, match="await it instead"):
        fake.rank.sync()


async def test_context_config_threads_and_process(fake: Fake, graph: RoleGraph) -> None:
    for rank, told in enumerate(await fake.describe()):
        context = told["context"]
        assert (context.role, context.rank, context.world_size, context.seed) == ("fake", rank, 2, 7)
        assert context.mesh.dp_rank == rank
        assert context.threads == 1
        assert context.device == "cpu"
        assert context.master_port >= 20000
        assert context.node
        assert told["in_setup_thread"], "setup and the main lane share a thread: thread counts are set there"
        assert told["omp"] == "1"
        assert told["config"] == {"key": 1}
    assert graph.startup["fake"] > 0


async def test_heavy_columns_stay_in_the_object_store(fake: Fake) -> None:
    before = rolegraph.batch.bytes_held()
    local = batch_of(10)
    out = await fake.identity(local)
    assert not out.is_local
    assert out["uid"].to_pylist() == local["uid"].to_pylist()
    with pytest.raises(BatchError, match=r"await batch.fetch\(\['text'\]\)"):
        out["text"]
    chosen = Batch.concat([out.slice(5, 10), out.slice(0, 5)]).repeat(2).filter([True, False] * 10)
    again = await fake.identity(chosen.with_columns({"reward": np.arange(10.0)}).drop(["text"]))
    assert rolegraph.batch.bytes_held() == before, "nothing heavy was deserialised so far"
    fetched = await again.fetch()
    order = [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert fetched["response_ids"].to_pylist() == local.take(order)["response_ids"].to_pylist()
    assert fetched.numpy("reward").tolist() == list(range(10))
    assert rolegraph.batch.bytes_held() > before
    only = await out.fetch(["text"])
    assert only.column_names == ["text"]
    assert only["text"].to_pylist() == local["text"].to_pylist()


async def test_streamed_columns_go_from_actor_to_actor_row_by_row(fake: Fake) -> None:
    batch = batch_of(9)
    held = rolegraph.batch.bytes_held()
    rows = batch.merge(await fake.states(batch)).take([8, 1, 4, 3])
    sums = await fake.read_states(rows)
    assert sums == [(False, float(4 * n * n)) for n in rows.numpy("length")]
    assert rolegraph.batch.bytes_held() == held, "the driver read none of it"


async def test_scattered_rows_arrive_in_order(fake: Fake) -> None:
    local = batch_of(60)
    parts = await asyncio.gather(*(fake.identity(local.slice(i, i + 10)) for i in range(0, 60, 10)))
    where = np.random.default_rng(1).permutation(60)
    out = await fake.identity(Batch.concat(parts).take(where))
    assert (await out.fetch()).table.select(local.column_names).equals(local.take(where).table)


async def test_heavy_columns_of_tuples(fake: Fake) -> None:
    batch, uids = await fake.halves(batch_of(5))
    assert not batch.is_local
    assert uids == [f"u{i}" for i in range(5)]
    assert (await batch.fetch())["response_ids"].to_pylist() == batch_of(5)["response_ids"].to_pylist()


async def test_merge_brings_columns_of_two_calls_together(fake: Fake) -> None:
    local = batch_of(6)
    scored, tagged = await asyncio.gather(fake.identity(local), fake.tag(local))
    both = scored.merge(tagged.select(["rank", "sum"]))
    assert (both.numpy("sum") == local.numpy("length") * 10).all()
    with pytest.raises(BatchError, match="'text' is in both"):
        scored.merge(tagged.select(["text"]))


async def test_balanced_parts_come_back_in_row_order(fake: Fake) -> None:
    local = batch_of(31)
    out = await fake.tag(local)
    assert out["uid"].to_pylist() == local["uid"].to_pylist()
    assert (out.numpy("sum") == local.numpy("length") * 10).all()
    ranks, lengths = out.numpy("rank"), local.numpy("length")
    assert abs(lengths[ranks == 0].sum() - lengths[ranks == 1].sum()) <= lengths.max()
    assert np.any(np.diff(ranks) < 0), "the parts are really interleaved"
    with pytest.raises(BatchError, match="balances its rows by the column 'length'"):
        await fake.tag(local.drop(["length"]))


async def test_empty_batch_calls_nobody(fake: Fake) -> None:
    nothing = batch_of(4).slice(0, 0)
    for out in (await fake.identity(nothing), await fake.tag(nothing), await fake.generate(nothing)):
        assert len(out) == 0
        assert out.column_names == nothing.column_names
    with pytest.raises(BatchError, match="was given no rows"):
        await fake.step(nothing)
    assert await fake.step(batch_of(3), lr=0.5) == {"rows": 2.0, "lr": 0.5}


async def test_control_lane_answers_while_the_main_lane_computes(fake: Fake, graph: RoleGraph) -> None:
    slow = fake.record(0, 1.0)
    await asyncio.sleep(0.1)
    started = time.perf_counter()
    assert len(await fake.are_you_there()) == 2
    busy = await graph.group("fake").metrics()
    assert time.perf_counter() - started < 0.6
    assert all("record" in one["busy"] and one["rss"] > 10**6 for one in busy)
    await slow


async def test_main_lane_calls_run_in_their_order(fake: Fake) -> None:
    calls = [fake.record(i, 0.01 * (5 - i)) for i in range(1, 6)]
    await asyncio.gather(*calls)
    assert [seen[-5:] for seen in await calls[-1]] == [[1, 2, 3, 4, 5]] * 2


async def test_an_error_names_role_rank_node_endpoint_and_its_first_traceback(fake: Fake) -> None:
    with pytest.raises(RoleError) as caught:
        await fake.fail_at(1)
    error = caught.value
    assert (error.role, error.rank, error.endpoint) == ("fake", 1, "fail_at")
    assert error.node
    text = str(error)
    assert text.startswith("role fake rank 1 on ")
    assert "in fail_at(): ValueError: boom" in text
    assert text.count("ValueError: boom") == 2
    assert text.count("Traceback (most recent call last)") == 1
    assert "in _deep" in text
    ours = str(Path(rolegraph.group.__file__).parent)
    assert ours not in error.remote_traceback, "the traceback begins in the role's own code"


async def test_a_failure_does_not_wait_for_hanging_peers(fake: Fake) -> None:
    started = time.perf_counter()
    with pytest.raises(RoleError, match="rank 0"):
        await fake.fail_at(0, hang=1.5)
    assert time.perf_counter() - started < 1.0


async def test_the_cause_is_shown_not_its_echo(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolegraph.group, "CAUSE_GRACE_S", 60.0)  # on a busy machine rank 1 may take its time to fail
    with pytest.raises(RoleError, match="KeyError: 'the real one'"):
        await fake.echo_failure(0.5)


async def test_queue_rows_come_back_in_order(fake: Fake) -> None:
    local = batch_of(12)
    out = await fake.generate(local, n=2, delay=0.02)
    assert out["uid"].to_pylist() == [f"u{i}" for i in range(12) for _ in range(2)]
    assert out["repeat"].to_pylist() == [0, 1] * 12
    assert set(out.numpy("served")) == {0, 1}
    answers = (await out.fetch())["answer_ids"].to_pylist()
    assert answers == [row[::-1] for row in local.repeat(2)["response_ids"].to_pylist()]


async def test_a_drained_queue_finishes_what_was_begun_and_holds_the_rest(graph: RoleGraph, fake: Fake) -> None:
    group, local = graph.group("fake"), batch_of(20)
    whole = asyncio.ensure_future(fake.generate(local, delay=0.3))
    while not any("generate" in one["busy"] for one in await group.metrics()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with group.drained():
        assert not any("generate" in one["busy"] for one in await group.metrics())
        await asyncio.sleep(0.2)
        assert not any("generate" in one["busy"] for one in await group.metrics()), "nothing is begun meanwhile"
        assert not whole.done(), "8 of 20 rows are worked on at a time"
        late = asyncio.ensure_future(fake.generate(batch_of(2)))
        assert await fake.doubled([1]) == [2], "calls without a queue go on"
        assert not late.done()
    assert (await whole)["uid"].to_pylist() == local["uid"].to_pylist()
    assert len(await late) == 2


async def test_a_call_reports_to_the_hook(graph: RoleGraph, fake: Fake) -> None:
    begun: list[tuple[str, str, int, int | None]] = []
    ended: list[tuple[str, int]] = []

    def on_call(role: str, name: str, rank: int, rows: int | None) -> Callable[[], None]:
        begun.append((role, name, rank, rows))
        return lambda: ended.append((name, rank))

    group = graph.group("fake")
    group.on_call = on_call
    try:
        await fake.doubled([1, 2, 3])
        assert begun == [("fake", "doubled", 0, 2), ("fake", "doubled", 1, 1)]
        assert sorted(ended) == [("doubled", 0), ("doubled", 1)], "before the caller goes on"
        with pytest.raises(RoleError):
            await fake.fail_at(1)
        assert ("fail_at", 1) in ended, "a call that fails has ended, too"
        with pytest.raises(TypeError, match="pickle"):
            await fake.doubled([1], plus=threading.Lock())  # type: ignore[arg-type]
        assert len(begun) - len(ended) <= 1, "one that cannot be sent has ended; rank 0 of fail_at may be on its way"
    finally:
        group.on_call = None


async def test_mesh_peers_get_the_same_part_and_are_collected_once() -> None:
    plan = plan_of(ranks=4, mesh=Mesh(dp=2, tp=2), cores=0.25)
    async with RoleGraph(plan, {"fake": spec_of()}, GraphOptions(exp_name="mesh")) as graph:
        out = await graph.handle("fake", Fake).tag(batch_of(9))
        assert out["uid"].to_pylist() == batch_of(9)["uid"].to_pylist()
        assert set(out.numpy("rank")) == {0, 2}


async def test_plain_overrides_keep_the_options() -> None:
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of(Plain)}, GraphOptions(exp_name="plain")) as graph:
        fake = graph.handle("fake", Fake)
        assert await fake.doubled([1, 2, 3]) == [1002, 1004, 1006]
        out = await fake.identity(batch_of(3))
        assert not out.is_local
        assert out["seen"].to_pylist() == [True] * 3


async def test_rows_of_a_dead_replica_are_neither_lost_nor_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = GraphOptions(exp_name="death", run_dir=str(tmp_path))
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, options) as graph:
        fake = graph.handle("fake", Fake)
        local = batch_of(40)
        out = await fake.die_on(local, "u2", rank=0)  # Rows 0, 2, 4 ... are offered to replica 0 first.
        assert graph.group("fake").alive == (1,)
        assert out["uid"].to_pylist() == local["uid"].to_pylist()
        assert (await out.fetch())["text"].to_pylist() == local["text"].to_pylist()
        assert caplog.text.count("fake rank 0: unanswered rows go back to the queue") == 1, "one line for all its parts"
        with pytest.raises(RoleError, match=r"no replica is left for \d+ of 40 rows; the last error: the actor died"):
            await fake.die_on(local, "u0", rank=1)


async def test_deterministic_queue_gives_each_replica_one_contiguous_part() -> None:
    options = GraphOptions(exp_name="deterministic", deterministic=True)
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, options) as graph:
        for _ in range(3):
            out = await graph.handle("fake", Fake).generate(batch_of(7))
            assert out.numpy("served").tolist() == [0, 0, 0, 0, 1, 1, 1]


async def test_a_dead_actor_says_so_with_its_last_words(tmp_path: Path) -> None:
    options = GraphOptions(exp_name="exit", run_dir=str(tmp_path))
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, options) as graph:
        with pytest.raises(RoleError, match=r"rank 1.*the actor died") as caught:
            await graph.handle("fake", Fake).exit_at(1, hang=3.0)
        assert "last words of the actor" in str(caught.value)
        assert await graph.group("fake").health(timeout_s=5) == [True, False]
        assert graph.group("fake").alive == (0,)


async def test_a_failing_setup_frees_everything(tmp_path: Path) -> None:
    options = GraphOptions(exp_name="setup", run_dir=str(tmp_path))
    with pytest.raises(RoleError, match=r"setup\(\): RuntimeError: no weights here"):
        await RoleGraph(plan_of(ranks=2), {"fake": spec_of(Fake, "fail in setup")}, options).start()
    async with RoleGraph(plan_of(ranks=2), {"fake": spec_of()}, options) as graph:
        child = (await graph.handle("fake", Fake).spawn_child())[0]
        assert is_running(child)
    assert wait_gone([child], seconds=5) == [], "child processes of a role end with it"
