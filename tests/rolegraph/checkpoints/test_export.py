"""Exports with a train role that writes a line: what is written, and when nothing is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rolegraph import cli
from rolegraph.checkpoints import folder
from rolegraph.checkpoints.export import alone, export
from rolegraph.config import load
from rolegraph.errors import CheckpointError, ConfigError, RoleError
from rolegraph.interfaces import TrainRole
from rolegraph.role import endpoint
from rolegraph.run import save_config


@dataclass
class WritingConfig:
    """What a train role of the tests takes."""

    ranks: int | None = None
    gpus: int | None = None
    cpus: float | None = None
    model: str | None = None
    tensor_model_parallel_size: int = 1
    tuner_type: str = "full"
    megatron: dict[str, Any] = field(default_factory=dict)


class Writing(TrainRole):
    """Writes into a folder what it loaded from another."""

    Config = WritingConfig
    config: WritingConfig
    loaded = ""

    @endpoint()
    def load(self, path: str, *, weights_only: bool = False) -> None:
        """Read a line."""
        assert weights_only
        self.loaded = (Path(path) / "weights").read_text()

    @endpoint()
    def export_hf(self, path: str, *, adapter: bool = False) -> None:
        """Write it, and fail where that is what it says."""
        Path(path).mkdir()
        (Path(path) / "model").write_text(f"{self.loaded} of {self.config.tensor_model_parallel_size}")
        if self.loaded == "broken":
            raise OSError("no room")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two checkpoints, of several ranks."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    overrides = ["algorithm=sft", "data=jsonl", "data.path=a.jsonl", f"model.path={tmp_path}/base", "model=hf"]
    target = f"{__name__}.Writing"
    overrides += [f"train._target_={target}", "train.ranks=4", "train.tensor_model_parallel_size=2"]
    run = load(overrides).run
    for step, content in ((5, "old"), (10, "new")):
        path = folder.begin(tmp_path / "run", step)
        save_config(run, path / "config.yaml")
        (path / "train" / "weights").write_text(content)
        folder.complete(path, step, metrics={"loss": 0.5})
    return tmp_path / "run"


def test_the_newest_of_a_run_becomes_a_folder_with_a_card(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "out") == 10
    assert (tmp_path / "out" / "model").read_text() == "new of 1"
    assert "step 10" in (tmp_path / "out" / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]


def test_the_command_names_what_it_wrote(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.dispatch(["export", str(run_dir / "checkpoints" / "step-5"), str(tmp_path / "a" / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a/out: the model of step 5\n"
    assert (tmp_path / "a" / "out" / "model").read_text() == "old of 1"


def test_what_is_there_already_stays(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="out is there already: choose another folder, or remove it"):
        export(run_dir, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    export(run_dir, tmp_path / "out")  # an empty folder is as good as none


def test_an_export_beside_another_into_one_folder_takes_nothing_from_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(part: Path, *_: Any, **__: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").write_text("the other's")

    monkeypatch.setattr("rolegraph.checkpoints.export.write_card", other)
    with pytest.raises(CheckpointError, match="out is there already"):
        export(run_dir, tmp_path / "out")
    assert (tmp_path / "out" / "model").read_text() == "the other's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]


def test_an_export_that_fails_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints" / "step-10" / "train" / "weights").write_text("broken")
    with pytest.raises(RoleError, match="no room"):
        export(run_dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_an_adapter_is_refused_where_all_weights_were_trained(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no adapter: leave out --adapter"):
        export(run_dir, tmp_path / "out", adapter=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "the following arguments are required: out: type rolegraph export CHECKPOINT OUT"),
        (["a", "b", "--adapters"], "unrecognized arguments: --adapters"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["gone", "b"], "gone is no folder"),
    ],
)
def test_command_lines_that_are_refused(words: list[str], message: str, capsys: Any) -> None:
    assert cli.dispatch(["export", *words]) != 0
    assert message in capsys.readouterr().err


def test_megatrons_role_is_asked_for_one_rank() -> None:
    mesh = ["train.ranks=8", "train.tensor_model_parallel_size=2", "train.pipeline_model_parallel_size=2"]
    run = alone(load(["experiment=quickstart", *mesh, "train.sequence_parallel=true", "train.cpus=64"]).run)
    train = run.roles["train"].config
    assert list(run.roles) == ["train"]
    assert (train.ranks, train.tensor_model_parallel_size, train.pipeline_model_parallel_size) == (1, 1, 1)
    assert train.cpus is None, "this machine may have fewer cores"
    assert train.problems() == []
