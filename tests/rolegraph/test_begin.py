"""What becomes of a run in a folder that holds one, before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph import run
from rolegraph.algorithms.base import Algorithm
from rolegraph.config.schema import RunConfig, Spec
from rolegraph.errors import ConfigError


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
