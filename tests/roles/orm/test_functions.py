"""The role around the verifier pool: text from ids, columns to functions, rewards to columns."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolegraph.batch import Batch
from rolegraph.errors import RewardError
from rolegraph.models.tiny import END, write_tokenizer
from rolegraph.rewards.config import RewardConfig
from rolegraph.role import RoleContext
from roles.orm.config import FunctionORMConfig
from roles.orm.functions import FunctionORM

PLUGIN = """
from rolegraph.rewards import reward

@reward
def length(completions, *, response_ids):
    return [float(len(ids)) for ids in response_ids]

@reward
def prompt_kind(completions, *, prompts, level):
    return [float(level[i]) if isinstance(prompts[i], str) else 10.0 + len(prompts[i]) for i in range(len(prompts))]

@reward
def fragile(completions):
    for text in completions:
        if "crash" in text:
            import os
            os._exit(1)
        if "hang" in text:
            import time
            time.sleep(600)
    return [None if "none" in text else 1.0 for text in completions]

@reward
async def judged(completions, **columns):
    return [float(len(columns["uid"])) for _ in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugins") / "my_rewards.py"
    file.write_text(PLUGIN)
    return str(file)


def make_config(model: Path, plugin: str, functions: list[Any], **options: Any) -> FunctionORMConfig:
    reward = RewardConfig(reward_funcs=functions, external_plugins=[plugin], **{"timeout_s": 2.0, **options})
    return FunctionORMConfig(model=str(model), reward=reward)


class Running:
    """A role that is set up, and torn down at the end."""

    def __init__(self, config: FunctionORMConfig) -> None:
        self.role = FunctionORM(config, RoleContext(role="orm", threads=2))

    def __enter__(self) -> FunctionORM:
        self.role.setup()
        return self.role

    def __exit__(self, *error: object) -> None:
        self.role.teardown()


def make_batch(model: Path, texts: Sequence[str], end: str = END, **columns: Any) -> Batch:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [tokenizer.encode(text + end, add_special_tokens=False).ids for text in texts]
    prompts = [tokenizer.encode(f"prompt {row}", add_special_tokens=False).ids for row in range(len(texts))]
    uids = [f"row{row}" for row in range(len(texts))]
    return Batch.from_columns({"uid": uids, "prompt_ids": prompts, "response_ids": ids, **columns})


def scored(role: FunctionORM, batch: Batch) -> dict[str, list[Any]]:
    return FunctionORM.score(role, batch).table.to_pydict()


def test_rewards_are_columns_and_their_weighted_sum(model: Path, plugin: str) -> None:
    config = make_config(model, plugin, ["exact_match", "length"], reward_weights=[1.0, -0.1])
    with Running(config) as role:
        batch = make_batch(model, ["7", "no"], answer=[7, 8])
        found = scored(role, batch)
        lengths = [float(len(ids)) for ids in batch.lists("response_ids")]
        assert found["response_text"] == ["7", "no"]
        assert found["rewards/exact_match"] == [1.0, 0.0]
        assert found["rewards/length"] == lengths
        assert found["reward"] == pytest.approx([1.0 - 0.1 * lengths[0], -0.1 * lengths[1]])
        assert found["reward_faults"] == [0, 0]
        assert found["reward_reasons"] == [None, None]
        assert found["uid"] == ["row0", "row1"]
        assert found["answer"] == [7, 8]


def test_faults_are_nulls_with_reasons_and_are_counted(model: Path, plugin: str) -> None:
    with Running(make_config(model, plugin, ["fragile", "exact_match"])) as role:
        texts = ["a", "crash", "none", "hang"]
        found = scored(role, make_batch(model, texts, answer=["a", "crash", "x", "y"]))
        assert found["rewards/fragile"] == [1.0, None, None, None]
        assert found["reward"] == [2.0, 1.0, 0.0, 0.0]
        assert found["reward_faults"] == [0, 1, 1, 1]
        names = [name for name in found if name.startswith("reward_faults/")]
        codes = [sum(bool(found[name][row]) for name in names) for row in range(4)]
        assert codes == found["reward_faults"], "each fault has its code, by function"
        assert found["reward_reasons"] == [None, "fragile: crash", "fragile: none", "fragile: timeout"]
        assert FunctionORM.metrics(role) == {
            "rows": 4.0,
            "faults/fragile/crash": 1.0,
            "faults/fragile/none": 1.0,
            "faults/fragile/timeout": 1.0,
        }


def test_a_row_without_any_reward_has_a_null(model: Path, plugin: str) -> None:
    with Running(make_config(model, plugin, ["fragile"])) as role:
        table = FunctionORM.score(role, make_batch(model, ["none"] * 2)).table
        assert table["reward"].to_pylist() == [None, None]
        assert str(table["reward"].type) == str(table["rewards/fragile"].type) == "double"


def test_prompts_are_messages_or_text_or_decoded(model: Path, plugin: str) -> None:
    with Running(make_config(model, plugin, ["prompt_kind", "judged"])) as role:
        messages = [[{"role": "user", "content": "?"}]]
        assert scored(role, make_batch(model, ["a"], level=[3], messages=messages))["rewards/prompt_kind"] == [11.0]
        assert scored(role, make_batch(model, ["a"], level=[3], prompt=["?"]))["rewards/prompt_kind"] == [3.0]
        assert scored(role, make_batch(model, ["a"], level=[4]))["rewards/prompt_kind"] == [4.0]
        assert scored(role, make_batch(model, ["a"] * 3, level=[4] * 3))["rewards/judged"] == [3.0] * 3


def test_rows_of_text_alone_and_candidates_that_were_never_drawn(model: Path, plugin: str) -> None:
    with Running(make_config(model, plugin, ["exact_match", "fragile"])) as role:
        batch = Batch.from_columns({"uid": ["a", "b", "c"], "response_text": ["7", None, "8"], "answer": [7, 7, 7]})
        found = scored(role, batch)
        assert found["reward"] == [2.0, None, 1.0]
        assert found["reward_reasons"] == [None, "exact_match: no_response; fragile: no_response", None]
        assert found["reward_faults"] == [0, 2, 0]
        assert found["response_text"] == ["7", None, "8"]
        found = scored(role, batch.with_columns({"response_ids": [[1], [], [2]]}))
        assert found["reward"] == [2.0, None, 1.0], "tokens that are none are no empty response"
    whole = make_config(model, plugin, ["exact_match"])
    config = FunctionORMConfig(model=whole.model, reward=whole.reward, skip_special_tokens=False)
    with Running(config) as role, pytest.raises(RewardError, match=r"orm\.skip_special_tokens=false needs the column"):
        scored(role, batch)


def test_lengths_are_judged_without_tokens_and_are_null_where_nobody_counted(model: Path, plugin: str) -> None:
    functions = [{"_target_": "soft_overlong", "max_length": 4, "cache": 2}, {"_target_": "length_penalty", "free": 3}]
    columns = {"uid": list("abc"), "response_text": ["x"] * 3, "response_length": [3, 8, None]}
    with Running(make_config(model, plugin, functions)) as role:
        found = scored(role, Batch.from_columns(columns))
    assert found["rewards/soft_overlong"] == [-0.5, -1.0, None]
    assert found["rewards/length_penalty"] == [0.0, -0.005, None]
    assert found["reward_faults"] == [0, 0, 2]


def test_special_tokens_are_left_out_unless_asked_for(model: Path, plugin: str) -> None:
    config = make_config(model, plugin, ["length"])
    batch = make_batch(model, ["a b\u00e9\n"])
    for skip, text in ((True, "a b\u00e9\n"), (False, f"a b\u00e9\n{END}")):
        with Running(FunctionORMConfig(model=config.model, reward=config.reward, skip_special_tokens=skip)) as role:
            assert scored(role, batch)["response_text"] == [text]


def test_empty_responses_and_empty_batches(model: Path, plugin: str) -> None:
    with Running(make_config(model, plugin, ["exact_match"])) as role:
        batch = make_batch(model, ["", "a"], end="", answer=["a", "a"])
        assert scored(role, batch)["reward"] == [0.0, 1.0]
        empty = FunctionORM.score(role, batch.slice(0, 0))
        assert (len(empty), str(empty.table["reward"].type)) == (0, "double")


def test_a_missing_column_names_function_and_columns(model: Path, plugin: str) -> None:
    with (
        Running(make_config(model, plugin, ["exact_match"])) as role,
        pytest.raises(RewardError, match=r"'exact_match' wants the column 'answer'.*solution"),
    ):
        FunctionORM.score(role, make_batch(model, ["a"], solution=["a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": None}, "no reward functions"),
        ({"model": None}, "no tokenizer"),
        ({"reward": RewardConfig(reward_funcs=["exact_macth"])}, "did you mean 'exact_match'"),
    ],
)
def test_what_is_missing_is_said_at_setup(model: Path, plugin: str, options: dict[str, Any], message: str) -> None:
    config = make_config(model, plugin, ["length"])
    role = FunctionORM(
        FunctionORMConfig(**{"model": config.model, "reward": config.reward, **options}), RoleContext(role="orm")
    )
    with pytest.raises(RewardError, match=message):
        role.setup()


def test_reasoning_gym_rows_are_scored_by_their_task(model: Path, plugin: str) -> None:
    entry = {"question": "What is 1 + 2?", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    with Running(make_config(model, plugin, ["reasoning_gym"])) as role:
        columns = {"task": ["chain_sum"] * 2, "entry": [json.dumps(entry)] * 2}
        assert scored(role, make_batch(model, ["3", "4"], **columns))["reward"] == [1.0, 0.0]


def test_the_role_starts_without_torch_and_at_once(model: Path) -> None:
    program = (
        "import sys, time; started = time.perf_counter()\n"
        "from rolegraph.rewards.config import RewardConfig; from rolegraph.role import RoleContext\n"
        "from roles.orm.config import FunctionORMConfig; from roles.orm.functions import FunctionORM\n"
        f"config = FunctionORMConfig(model={str(model)!r}, reward=RewardConfig(reward_funcs=['math_equivalence']))\n"
        "role = FunctionORM(config, RoleContext()); role.setup(); role.teardown()\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'sympy'} & sys.modules.keys(); assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def ray_orm(ray_cluster: None, model: Path, plugin: str) -> Iterator[Any]:
    from rolegraph.actor import Launch, actor_class
    from rolegraph.group import RoleGroup
    from rolegraph.host import RoleSpec
    from rolegraph.member import RayMember
    from rolegraph.role import Mesh

    config = make_config(model, plugin, ["exact_match", "fragile"])
    contexts = [RoleContext(role="orm", rank=rank, world_size=2, threads=1) for rank in range(2)]
    launches = [Launch(pickle.dumps(RoleSpec(FunctionORM, config)), context, {}, sys.path) for context in contexts]
    made = actor_class(FunctionORM)
    members = [RayMember(made.options(num_cpus=0.1).remote(launch), launch.context) for launch in launches]
    group = RoleGroup(FunctionORM, members, Mesh(dp=2))
    yield group
    for member in members:
        member.kill()


@pytest.mark.ray
async def test_replicas_share_the_rows_and_leave_nothing_when_killed(ray_orm: Any, model: Path) -> None:
    await ray_orm.start()
    texts = [str(row) for row in range(70)]
    texts[20], texts[50] = "crash", "hang"
    batch = make_batch(model, texts, answer=[str(row) for row in range(70)])
    found = await (await ray_orm.handle.score(batch)).fetch()
    columns = found.table.to_pydict()
    assert columns["uid"] == [f"row{row}" for row in range(70)]
    assert [row for row, value in enumerate(columns["rewards/exact_match"]) if not value] == [20, 50]
    assert [row for row, value in enumerate(columns["rewards/fragile"]) if value is None] == [20, 50]
    metrics = await ray_orm.handle.metrics()
    assert sum(one["rows"] for one in metrics) == 70
    assert all(one["rows"] > 0 for one in metrics)
    pids = [one["pid"] for one in await ray_orm.metrics()]
    children = [child for pid in pids for child in descendants(pid)]
    assert len(children) > len(pids), "nurseries and the workers they made"
    for member in ray_orm.members:
        member.kill()
    assert all_end(children, seconds=10)


def all_end(pids: Sequence[int], seconds: float) -> bool:
    """Whether no process of `pids` runs after at most so long; a zombie does not run."""

    def runs(pid: int) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    children = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]
