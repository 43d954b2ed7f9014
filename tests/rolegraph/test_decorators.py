"""Decorated classes in this process: what runs where, every refusal, and what mypy makes of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolegraph.batch import Batch
from rolegraph.decorators import function, initialize, take_device_groups, worker
from rolegraph.errors import ConfigError, RoleError, RoleGraphError
from tests.rolegraph.workers import Broken, Calculator, Louder, MyTrainer, NotDecorated, arguments
from tests.typed import errors_of


def test_the_two_model_program() -> None:
    with initialize(use_ray=False, env={"TOLD": "yes"}):
        trainer = MyTrainer(arguments())
        assert trainer.prepared == [None, None], "passed over on the driver"
        assert (trainer.where, trainer.data) == ("driver", list(range(7)))
        losses = trainer.train()
        weight = losses[0][0][1]
        assert [samples for samples, _ in losses] == [[(weight + step) * n for n in range(7)] for step in range(3)]
        assert [loss for _, loss in losses] == [21 * (weight + step) + 0.5 for step in range(3)]
        (here,) = trainer.what_is_here()
        assert (here["where"], here["size"], here["has_bias"], here["told"]) == ("model1", 7, False, "yes")
        assert trainer.update(10) == weight + 13


def test_every_way_to_dispatch_and_collect() -> None:
    with initialize({"g": {"device": "CPU", "ranks": 3, "workers": ["calc"]}}, use_ray=False):
        calc = Calculator(1, names=("a",))
        assert calc.about() == [(1, ("a",))]
        assert calc.squares([3, 1, 2]) == [2, 5, 10]
        assert calc.scaled({"a": [1, 2], "b": [3]}, scale=2) == [{"a": 6, "b": 6}]
        assert calc.weighted([1, 2], np.ones(3), (5, 6)) == [8.0, 11.0]
        assert calc.halves([4, 6]) == ([2.0, 3.0], ["4", "6"])
        assert calc.tokens(Batch.from_columns({"n": [1, 2]})).fetch_sync()["ids"].to_pylist() == [[1, 2], [2, 3]]
        assert calc.halves([]) == ([], [])
        assert calc.weighted([], np.ones(3), (5, 6)) == []


def test_no_rows_for_a_method_without_annotations() -> None:
    with initialize(use_ray=False):
        assert MyTrainer(arguments()).rollout([]) == []


def test_a_subclass_overrides_functions_by_plain_methods() -> None:
    with initialize(use_ray=False):
        assert Louder(1).squares([2]) == [1005]
    with initialize(use_ray=False), pytest.raises(RoleGraphError, match=r"NotDecorated is a subclass.*@worker\(group="):
        NotDecorated()


def test_one_class_a_group_and_what_a_group_belongs_to() -> None:
    with initialize(use_ray=False):
        calc, trainer = Calculator(2), MyTrainer(arguments())
        assert calc.squares(trainer.rollout([0])) == [2]
        with pytest.raises(
            RoleGraphError, match="Louder is constructed, and a Calculator has the actors of group calc"
        ):
            Louder(1)


def test_devices_of_every_group() -> None:
    half = {"g": {"device": "CPU", "ranks": 1, "workers": ["model1"]}}
    with (
        initialize(half, use_ray=False),
        pytest.raises(
            RoleGraphError, match="MyTrainer has functions in group model2, and device_groups gives it no dev"
        ),
    ):
        MyTrainer(arguments())


def test_before_and_after_the_block() -> None:
    with pytest.raises(RoleGraphError, match=r"MyTrainer is constructed before initialize\(\)"):
        MyTrainer(arguments())
    with initialize(use_ray=False) as session:
        with pytest.raises(RoleGraphError, match=r"initialize.* was called before"):
            initialize(use_ray=False)
        trainer = MyTrainer(arguments())
    assert not session.is_open
    with pytest.raises(RoleGraphError, match=r"rollout\(\) is called, and the actors of group model1 have ended"):
        trainer.rollout([1])
    session.close()
    again = initialize(use_ray=False)
    assert MyTrainer(arguments()).rollout([0]) == [0]
    again.close()


def test_errors_name_the_place_and_show_the_traceback() -> None:
    with initialize(use_ray=False):
        trainer = MyTrainer(arguments())
        with pytest.raises(RoleError, match=r"role model2 rank 0 on .* in fail_on\(\): ValueError: 3 cannot") as caught:
            trainer.fail_on([3], 3)
        first = caught.value.remote_traceback.splitlines()[1]
        assert "workers.py" in first, "without the frames that lead to the user's code"
        with pytest.raises(RoleError, match=r"forward_model2\(\) is a function of group model2, called in an actor of"):
            trainer.ask_model2()
        with pytest.raises(RoleError, match=r"role broken rank 0 on .* in setup\(\): OSError: no such weights"):
            Broken()
        with pytest.raises(RoleError, match="no such weights"):
            Broken()  # its group was not kept


def test_an_exception_of_the_program_ends_its_groups() -> None:
    with pytest.raises(KeyError), initialize(use_ray=False):
        MyTrainer(arguments()).train()
        assert lanes()
        raise KeyError("of the program")
    deadline = time.monotonic() + 5
    while lanes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes() == []


def lanes() -> list[str]:
    """The threads that run MyTrainer's groups."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("model1-", "model2-"))]


def test_arguments_that_cannot_be_copied() -> None:
    with initialize(use_ray=False), pytest.raises(RoleGraphError, match=r"arguments of Calculator\(\.\.\.\) cannot be"):
        Calculator(threading.Lock())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "needs device_groups.*use_ray=False"),
        (
            {"g": {"device": "CPU", "ranks": 1, "workers": ["modl1"]}},
            "device_groups.g names the worker `modl1`.*did you",
        ),
        ({"g": {"device": "NPU", "ranks": 1, "workers": ["model1"]}}, "device_groups.g.device: NPU is a device that"),
        ({"g": {"device": "CPU", "rank": 1, "workers": ["model1"]}}, "g.rank: unknown key; did you mean ranks"),
        ('{"g": 3', "is no JSON: Expecting ',' delimiter"),
    ],
)
def test_faulty_groups_are_refused_before_anything_starts(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        initialize(groups)
    initialize(use_ray=False).close()


def test_device_groups_of_the_command_line() -> None:
    argv = ["train.py", "--size", "3", "--device_groups", '{"g": {"device": "CPU"}}', "x"]
    assert take_device_groups(argv) == {"g": {"device": "CPU"}}
    assert argv == ["train.py", "--size", "3", "x"]
    assert take_device_groups(argv) is None


def decorated(group: Any = "a", **options: Any) -> None:
    """Decorate a class with one function of group a."""

    @worker(group=group)
    class Some:
        @function("a", **options)
        def method(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "ab"}, "Some.method is a function of group 'a', which @worker lacks: did you mean ab"),
        ({"group": ["a", "b"]}, "Some has no function of group 'b'"),
        ({"group": []}, r"worker\(group=\[\]\): name its groups"),
        ({"group": ["a", "a"]}, "name its groups, each once"),
        ({"dispatch": "slices"}, r"function\(dispatch='slices'\): use all, slice or a callable"),
        ({"dispatch": "queue"}, "use all, slice or a callable"),
        ({"execute": "rank0"}, "use all, first"),
        ({"collect": "concat"}, "use none, flatten or a callable"),
    ],
)
def test_declarations_are_checked_where_they_are_written(options: dict[str, Any], message: str) -> None:
    decorated()
    with pytest.raises(TypeError, match=message):
        decorated(**options)


def test_other_declarations_that_cannot_work() -> None:
    with pytest.raises(TypeError, match=r"function\(group=\[\]\): name one group"):
        function([])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"Some.setup: actors have a `setup` of their own"):

        @worker("a")
        class Some:
            @function("a")
            def setup(self) -> None: ...

    with pytest.raises(TypeError, match=r"Other.squares overrides a function with 3"):
        worker("calc")(type("Other", (Calculator,), {"squares": 3}))

    class Bare:
        @function("a")
        def method(self) -> None: ...

    with pytest.raises(RoleGraphError, match=r"Bare.method\(\) is a function of group a, and Bare is not decorated"):
        Bare().method()


RIGHT = """
from collections.abc import Sequence
from rolegraph.batch import Batch
from rolegraph.decorators import function, initialize, worker

def total(results: Sequence[list[int]]) -> int:
    return 0

@worker(group=["a", "b"])
class Program:
    def __init__(self, size: int) -> None:
        self._load(size)
    @function(group="a")
    def _load(self, size: int) -> None: ...
    @function(group="a", dispatch="slice", collect="flatten")
    def sample(self, prompts: list[str], n: int = 1) -> list[str]:
        return prompts
    @function(group="b", dispatch=lambda n, i, data: data[i::n], collect=total)
    def count(self, data: list[int]) -> list[int]:
        return data
    @function(group="b", execute="first")
    def first(self) -> float:
        return 0.0
    @function(group="b")
    def each(self) -> Batch:
        raise NotImplementedError
    def run(self) -> int:
        texts: list[str] = self.sample(["a"], n=2)
        number: int = self.count([1])
        one: float = self.first()
        batches: list[Batch] = self.each()
        return len(texts) + number + int(one) + len(batches)

with initialize(device_groups={}) as session:
    program: Program = Program(3)
    done: int = program.run()
"""
WRONG = """
    program.sampel(["a"])
    program.sample(3)
    program.sample(["a"]).items()
    Program("three")
"""


@pytest.mark.slow
def test_mypy_sees_decorated_classes_as_they_are(tmp_path: Path) -> None:
    found = errors_of(tmp_path, RIGHT, WRONG)
    assert len(found) == 4, found
    assert 'has no attribute "sampel"' in found[0]
    assert 'incompatible type "int"; expected "list[str]"' in found[1]
    assert '"list[str]" has no attribute "items"' in found[2]
    assert 'incompatible type "str"; expected "int"' in found[3]
