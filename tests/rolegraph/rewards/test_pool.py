"""The verifier pool: whatever a function does, its neighbours are scored and the pool goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolegraph.errors import RewardError
from rolegraph.interfaces import FAULT_REASONS
from rolegraph.rewards import pool as pool_module
from rolegraph.rewards.config import RewardConfig
from rolegraph.rewards.pool import Budget, Scores, VerifierPool, weighted
from rolegraph.rewards.worker import Call, Scored

PLUGIN = str(Path(__file__).with_name("faulty.py"))


def make_pool(*functions: Any, workers: int = 2, **options: Any) -> VerifierPool:
    config = RewardConfig(reward_funcs=list(functions), external_plugins=[PLUGIN], **{"timeout_s": 2.0, **options})
    return VerifierPool(config, workers=workers)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with make_pool("faulty") as made:
        yield made


def alive(pid: int) -> bool:
    """Runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hang", "timeout"),
        ("hang_in_c", "timeout"),
        ("segfault", "crash"),
        ("exit", "crash"),
        ("abort", "crash"),
        ("killed", "crash"),
        ("sys_exit", "exception"),
        ("raise", "exception"),
        ("interrupt", "exception"),
        ("none", "none"),
        ("nan", "not_finite"),
        ("infinite", "not_finite"),
        ("huge", "not_finite"),
        ("text", "not_a_number"),
        ("list", "not_a_number"),
    ],
)
def test_one_bad_row_is_null_with_its_reason_and_its_neighbours_are_scored(
    pool: VerifierPool, kind: str, reason: str
) -> None:
    before = pool.faults().get(("faulty", reason), 0)
    scores = pool.score(["1", "2", kind, "0", "5"], {})["faulty"]
    assert scores.values == [1.0, 2.0, None, 0.0, 5.0]
    assert scores.reasons == [None, None, reason, None, None]
    assert pool.faults()["faulty", reason] == before + 1
    assert pool.score(["7"], {})["faulty"].values == [7.0]


def test_a_result_of_the_wrong_shape_is_null() -> None:
    expected = {"short": "wrong_length", "endless": "wrong_length", "not_a_list": "not_a_list"}
    with make_pool(*expected) as pool:
        scores = pool.score(["1", "2"], {})
    for name, reason in expected.items():
        assert (scores[name].values, scores[name].reasons) == ([None, None], [reason, reason])


def test_rows_that_all_hang_use_no_more_than_the_time_of_their_call() -> None:
    with make_pool("faulty", workers=1, timeout_s=2.0) as pool:
        started = time.monotonic()
        scores = pool.score(["hang_in_c"] * 6, {})["faulty"]
        assert scores.reasons == ["timeout"] * 6
        # Six forks and imports of the plugin come on top; a limit of 2 s a row would be 12 s.
        assert time.monotonic() - started < 8


def test_hangs_on_one_worker_leave_time_for_the_rows_behind_them() -> None:
    with make_pool("faulty", workers=1, timeout_s=4.0) as pool:
        scores = pool.score(["hang", "1", "hang", "2", "3"], {})["faulty"]
        assert scores.values == [None, 1.0, None, 2.0, 3.0]


def test_budget_never_gives_out_more_than_it_has() -> None:
    budget = Budget(8.0, rows=4)
    assert budget.take_all_rows() == 4.0
    limits = [budget.take_row() for _ in range(4)]
    assert limits[0] == 1.0
    assert sum(limits) == pytest.approx(4.0)
    assert Budget(8.0, rows=1).take_all_rows() == 8.0
    budget.give_back(3.0)
    assert budget.take_row() == pytest.approx(3.0)


def test_starting_a_lost_worker_anew_takes_nothing_from_the_rows_time(tmp_path: Path) -> None:
    plugin = tmp_path / "slow_to_load.py"
    plugin.write_text(
        "import os, time\nfrom rolegraph.rewards import reward\ntime.sleep(1.5)\n"
        "@reward\ndef worker_id(completions):\n    return [os.getpid() for _ in completions]\n"
    )
    with VerifierPool(RewardConfig(reward_funcs=["worker_id"], external_plugins=[str(plugin)])) as pool:
        before = pool.score(["a"], {})["worker_id"].values[0]
        assert before is not None
        os.kill(int(before), signal.SIGKILL)
        assert wait_until(lambda: not alive(int(before)))
        budget = Budget(60.0, rows=2)
        call = Call(0, ["a", "b"], {})
        reply = pool._plain.submit(call, budget, alone=False).result()
        assert isinstance(reply, Scored)
        assert reply.values[0] not in (None, before)
        assert budget.take_all_rows() / 0.5 > 58.6, "of 60 s; loading took 1.5"


def test_functions_fail_apart() -> None:
    with make_pool("faulty", "exact_match", {"_target_": "faulty", "name": "double", "scale": 2.0}) as pool:
        scores = pool.score(["exit", "2"], {"answer": ["exit", "3"]})
        assert scores["faulty"].values == [None, 2.0]
        assert scores["exact_match"].values == [1.0, 0.0]
        assert scores["double"].values == [None, 4.0]


def test_long_batches_are_cut_into_calls_and_keep_their_order() -> None:
    with make_pool("faulty", rows_per_call=4) as pool:
        texts = [str(row) for row in range(30)]
        texts[9] = "exit"
        values = pool.score(texts, {})["faulty"].values
        assert values == [None if row == 9 else float(row) for row in range(30)]
        assert pool.faults() == {("faulty", "crash"): 1}
        assert pool.score([], {})["faulty"].values == []


def test_output_of_any_size_blocks_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make_pool("chatty") as pool:
        assert pool.score(["1"], {})["chatty"].values == [1.0]
    assert "xxx" in capfd.readouterr().out


def test_async_rows_and_calls_wait_at_the_same_time() -> None:
    with make_pool({"_target_": "slow_async", "seconds": 0.5}, rows_per_call=4, timeout_s=10) as pool:
        texts = [str(row) for row in range(32)]
        pool.score(texts, {})
        started = time.monotonic()
        assert pool.score(texts, {})["slow_async"].values == [float(row) for row in range(32)]
        # Row after row it would be 16 s; call after call on the two workers of plain functions 2 s.
        assert time.monotonic() - started < 1.5


def test_an_async_hang_is_a_timeout() -> None:
    with make_pool("hanging_async", timeout_s=2.0) as pool:
        scores = pool.score(["1", "hang", "2"], {})["hanging_async"]
        assert (scores.values, scores.reasons) == ([1.0, None, 1.0], [None, "timeout", None])


def test_functions_get_the_columns_they_name() -> None:
    with make_pool("lengths", "column_names") as pool:
        scores = pool.score(["a", "b"], {"response_ids": [[1, 2], [3]], "level": [1, 2]})
        assert scores["lengths"].values == [2.0, 1.0]
        assert scores["column_names"].values == [2.0, 2.0]
        scores = pool.score(["a", "b"], {"response_ids": [[1, 2], [3]], "bonus": [0.5, 0.25]})
        assert scores["lengths"].values == [2.5, 1.25]


def test_a_missing_column_is_an_error_that_names_it() -> None:
    with make_pool("exact_match") as pool:
        with pytest.raises(RewardError, match=r"'exact_match' wants the column 'answer'.*they have: prompts, solution"):
            pool.score(["1"], {"solution": ["1"], "prompts": ["?"]})
        assert pool.faults() == {}


def test_a_class_is_made_once_a_worker_and_keeps_its_state() -> None:
    with make_pool({"_target_": "faulty.Counting", "start": 10}, workers=1) as pool:
        assert [pool.score(["a"], {})["Counting"].values for _ in range(2)] == [[11.0], [12.0]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise OSError('no judge today')", "OSError: no judge today"),
        ("import os; os._exit(4)", "exited with code 4"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("", "no reward function is called 'mine'"),
    ],
)
def test_a_function_that_cannot_be_loaded_ends_the_start(tmp_path: Path, source: str, message: str) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(source)
    pool = VerifierPool(RewardConfig(reward_funcs=["mine"], external_plugins=[str(plugin)], start_timeout_s=60.0))
    if "sleep" in source:
        # The workers' time alone: on a busy machine the libraries they share may take longer than a second to import.
        for lane in (pool._plain, pool._async):
            for worker in lane._workers:
                worker._timeout_s = 1.0
    with pytest.raises(RewardError, match=message):
        pool.start()


def test_a_worker_killed_while_idle_costs_no_row() -> None:
    with make_pool("worker_id", workers=1) as pool:
        first = pool.score(["a"], {})["worker_id"].values[0]
        assert first is not None
        os.kill(int(first), signal.SIGKILL)
        assert wait_until(lambda: not alive(int(first)))
        second = pool.score(["a"], {})["worker_id"].values[0]
        assert second is not None
        assert second != first


def test_a_lost_nursery_is_started_again() -> None:
    with make_pool("worker_id", "faulty", workers=1) as pool:
        process = pool._nursery._process
        assert process is not None
        process.kill()
        process.wait()
        assert wait_until(lambda: pool.score(["1"], {})["faulty"].values == [1.0])


def test_a_closed_pool_leaves_no_process() -> None:
    pool = make_pool("worker_id", workers=1)
    pool.start()
    worker = pool.score(["a"], {})["worker_id"].values[0]
    assert worker is not None
    assert alive(int(worker))
    pool.close()
    assert wait_until(lambda: not alive(int(worker)))


def test_a_hanging_worker_dies_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with make_pool("with_child", timeout_s=1.0) as pool:
        assert pool.score(["a"], {"pid_file": [str(file)]})["with_child"].reasons == ["timeout"]
        for pid in map(int, file.read_text().split()):
            assert wait_until(lambda pid=pid: not alive(pid))


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    program = (
        "from rolegraph.rewards.config import RewardConfig; from rolegraph.rewards.pool import VerifierPool\n"
        f"config = RewardConfig(reward_funcs=['with_child'], external_plugins=[{PLUGIN!r}], timeout_s=600)\n"
        "pool = VerifierPool(config); pool.start(); print(pool._nursery._process.pid, flush=True)\n"
        f"pool.score(['a'], {{'pid_file': [{str(file)!r}]}})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        nursery = int(parent.stdout.readline())
        assert wait_until(lambda: file.exists() and len(file.read_text().split()) == 2, 30)
    finally:
        parent.kill()
        parent.wait()
    for pid in (nursery, *map(int, file.read_text().split())):
        assert wait_until(lambda pid=pid: not alive(pid))


def test_every_reason_has_a_number() -> None:
    table = re.findall(r"^\| ([a-z_, ]+) \|", pool_module.__doc__ or "", flags=re.MULTILINE)
    reasons = {reason for row in table[1:] for reason in row.split(", ")}
    assert reasons == set(FAULT_REASONS) - {"other", "unparsable", "no_reply", "no_response", "too_long"}
    codes = Scores([1.0, None, None], [None, "timeout", "a reason of a subclass"]).codes
    assert codes == [0, 1 + FAULT_REASONS.index("timeout"), 1 + FAULT_REASONS.index("other")]


def test_weighted_sum_leaves_out_nulls() -> None:
    scores = {"a": [1.0, None, None, 0.0], "b": [0.5, 0.5, None, None]}
    assert weighted(scores, {"a": 2.0, "b": -1.0}) == [1.5, -0.5, None, 0.0]
