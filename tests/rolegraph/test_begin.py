"""What becomes of a run in a folder that holds one, before anything starts, and of one whose trainer dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph import reading, run
from rolegraph.algorithms.base import Algorithm
from rolegraph.batch import Batch
from rolegraph.checkpoints.config import CheckpointConfig
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.data import Dataset
from rolegraph.data.report import Report
from rolegraph.errors import CheckpointError, ConfigError, RoleError


class Fresh(Algorithm):
    pass


class Lasting(Algorithm):
    can_resume = True

    @classmethod
    def begin(cls, config: RunConfig, run_dir: Path) -> str | None:
        return f"finished already: [{run_dir.name}] has everything" if config.resume else None


def _main(algorithm: type[Algorithm], folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> list[str]:
    """What a run of the algorithm does in the folder."""
    done: list[str] = []
    monkeypatch.setattr(run, "save_config", lambda config, path: done.append("config saved"))

    async def start(config: RunConfig, run_dir: Path) -> None:
        done.append("started")

    monkeypatch.setattr(run, "_run", start)
    spec = Spec(f"{__name__}.{algorithm.__name__}", None)
    values = {"algorithm": spec, "output_dir": str(folder), "ray_exp_name": None, "resume": False, **config}
    run.main(SimpleNamespace(**values))  # type: ignore[arg-type]
    return done


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _main(Fresh, tmp_path / "new", monkeypatch) == ["config saved", "started"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=f"output_dir={tmp_path} holds a run already: choose another folder"):
        _main(Fresh, tmp_path, monkeypatch)
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {"metrics.jsonl", ".lock"}


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from pathlib import Path; from rolegraph.results import alone_in\n"
        f"with alone_in(Path({str(tmp_path)!r})):\n    print('here', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(ConfigError, match=f"output_dir={tmp_path} is being written by a run that still goes on"):
            _main(Lasting, tmp_path, monkeypatch, resume=True)
        other.kill()
    assert _main(Lasting, tmp_path, monkeypatch) == ["config saved", "started"]


def test_an_algorithm_may_go_on_or_have_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert _main(Lasting, folder, monkeypatch) == ["config saved", "started"]
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert _main(Lasting, folder, monkeypatch, resume=True) == []
    assert "finished already: [run] has everything" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


async def test_models_are_compared_before_roles_start_and_rows_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"models": {"model": {"path": "m", "sha256": "1"}}, "data": {"rows": 1, "sha256": "2"}}
    checkpoint: Any = SimpleNamespace(path="step-5", driver={"about": about})
    models, rows = {"model": {"path": "m", "sha256": "1"}}, Report(content="2")

    async def load_all(config: Any, model_path: str) -> Any:
        return Dataset(Batch.from_columns({"uid": ["a"]}), rows), {}

    monkeypatch.setattr(reading, "of_models", lambda config: models)
    monkeypatch.setattr(reading, "load_all", load_all)
    saving: Any = SimpleNamespace(checkpoint=CheckpointConfig(every=1))
    found = reading.models_about(saving, checkpoint)
    assert found == {"models": models}
    await reading.load_checked(saving, "m", found, checkpoint)
    assert found == about, "and checkpoints of this run say so"
    rows.content = "3"
    with pytest.raises(CheckpointError, match="data had 1 rows, and has 1 of other content"):
        await reading.load_checked(saving, "m", found, checkpoint)
    models["model"] = {"path": "n", "sha256": "4"}
    with pytest.raises(CheckpointError, match="model was m, and is n"):
        reading.models_about(saving, checkpoint)
    nothing: Any = SimpleNamespace(checkpoint=CheckpointConfig())
    assert reading.models_about(nothing, None) == {}, "models are not read where nobody asks"


@pytest.mark.parametrize("own", [None, "its own"])
async def test_a_trainer_that_dies_goes_on_from_where_the_run_began_while_there_is_nothing_newer(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_from: list[Any] = []

    class Mortal:
        def __init__(self, *of: Any) -> None:
            pass

        async def has_died(self) -> Any:
            return "a death"

        async def end(self, hooks: Any) -> None:
            pass

        async def restart(self) -> None:
            pass

        def may_restart(self, death: Any, going_on: str) -> bool:
            return True

    async def algorithm(ready: Any, checkpoint: Any, hooks: Any) -> None:
        began_from.append(checkpoint)
        if len(began_from) == 1:
            raise RoleError("died", role="train", rank=0)

    first: Any = SimpleNamespace(step=4)
    newer = None if own is None else SimpleNamespace(step=8)
    monkeypatch.setattr(run, "TrainGroup", Mortal)
    monkeypatch.setattr(run, "run_algorithm", algorithm)
    monkeypatch.setattr(run, "newest", lambda run_dir: newer)
    ready: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(every=1)),
        telemetry=SimpleNamespace(run_dir=Path()),
        hooks=SimpleNamespace(make=tuple),
        graph=None,
        turns=None,
        care=None,
    )
    await run.run_to_the_end(ready, first)
    assert began_from == [first, newer or first]
