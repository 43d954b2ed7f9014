"""From where a run goes on, and what is refused before it does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rolegraph.batch import Batch
from rolegraph.checkpoints import fingerprint, folder, resume
from rolegraph.config.schema import Spec
from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.interfaces import TrainRole

TREE: dict[str, Any] = {
    "seed": 0,
    "max_steps": 20,
    "output_dir": "one",
    "algorithm": {"_target_": "grpo", "beta": 0.1, "ranks": 1},
    "train": {"_target_": "megatron", "ranks": 2, "lr": 1e-6, "lr_schedule": "constant", "decay_steps": None},
    "rollout": {"_target_": "vllm", "replicas": 1, "dtype": "float32"},
    "data": {"path": "a.jsonl", "max_length": 64},
    "checkpoint": {"every": 5},
    "placement": {"colocate_groups": "all"},
    "model": {"path": "m"},
}


def config(now: Any, *, max_steps: int | None = 20, **changes: Any) -> Any:
    return SimpleNamespace(resume=now, tree={**TREE, "max_steps": max_steps, **changes}, max_steps=max_steps)


def make(run_dir: Path, step: int, *, number: int | None = None, is_main: bool = True) -> folder.Checkpoint:
    path = folder.begin(run_dir, step)
    at = {"stage": "grpo", "number": step if number is None else number, "of": 20, "is_main": is_main}
    (path / "driver.json").write_text(json.dumps({"at": at}))
    (path / "config.yaml").write_text(yaml.safe_dump(TREE))
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder.complete(path, step, metrics={})


def test_where_a_run_begins(tmp_path: Path) -> None:
    assert resume.start_of(config(False), tmp_path / "new") is None
    assert resume.start_of(config("auto"), tmp_path / "new") is None
    with pytest.raises(ConfigError, match=r"resume=true: output_dir=\S+new holds no whole checkpoint to go on from"):
        resume.start_of(config(True), tmp_path / "new")
    make(tmp_path, 5)
    last = make(tmp_path, 10)
    for now in (True, "auto", str(tmp_path), str(last.path)):
        assert resume.start_of(config(now), tmp_path) == last
    assert resume.start_of(config(str(tmp_path)), tmp_path / "new") == last
    with pytest.raises(ConfigError, match=r"holds a run already: choose another folder, .*go on with resume=true"):
        resume.start_of(config(False), tmp_path)
    with pytest.raises(ConfigError, match=r"begins from step 5, and output_dir=\S+ holds a run already"):
        resume.start_of(config(str(folder.folder_of(tmp_path, 5))), tmp_path)


def test_metrics_without_a_checkpoint_are_gone_over_only_when_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert resume.begin(config("auto"), tmp_path) is None
    with pytest.raises(ConfigError, match=r"holds a run already: choose another folder, or remove that one$"):
        resume.begin(config(False), tmp_path)


def test_layout_logging_and_what_is_around_a_run_may_change(tmp_path: Path) -> None:
    make(tmp_path, 10)
    changed = config(
        True,
        max_steps=30,
        output_dir="two",
        train={**TREE["train"], "ranks": 1, "micro_batch_size": 2, "tensor_model_parallel_size": 2},
        rollout={**TREE["rollout"], "replicas": 4},
        data={"path": "b.jsonl", "max_length": 64},
        checkpoint={"every": 7},
        placement={"colocate_groups": []},
        model={"path": "elsewhere"},
        eval={"every": 3},
    )
    assert resume.begin(changed, tmp_path) is None


def test_every_setting_that_changes_numbers_is_named(tmp_path: Path) -> None:
    make(tmp_path, 10)
    changed = config(
        "auto",
        seed=1,
        algorithm={"_target_": "grpo", "beta": None, "ranks": 2, "delta": 2.0},
        train={**TREE["train"], "lr": 2e-6},
        data={"path": "a.jsonl", "max_length": 32},
    )
    with pytest.raises(ConfigError) as caught:
        resume.begin(changed, tmp_path)
    first, *lines, last = str(caught.value).splitlines()
    assert first.startswith("resume=auto: the run of ")
    assert lines == [
        "  algorithm.beta was 0.1, and is null",
        "  algorithm.delta was not there, and is 2.0",
        "  algorithm.ranks was 1, and is 2",
        "  data.max_length was 64, and is 32",
        "  seed was 0, and is 1",
        "  train.lr was 1e-06, and is 2e-06",
    ]
    assert last == "Give it the same, or begin in a new output_dir with resume=false"


def test_more_steps_are_refused_where_the_learning_rate_would_fall_otherwise() -> None:
    def changed(**train: Any) -> list[str]:
        tree = {**TREE, "train": {**TREE["train"], **train}}
        return list(resume.differences(tree, {**tree, "max_steps": 30}))

    assert changed() == []
    assert changed(lr_schedule="linear", decay_steps=20) == []
    assert changed(lr_schedule="linear") == [
        "max_steps was 20, and is 30, where train.lr_schedule=linear ends: set train.decay_steps=20 to keep the "
        "schedule"
    ]


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    make(tmp_path, 25, number=20)
    said = resume.begin(config(True), tmp_path)
    assert said is not None
    assert said.startswith("finished already: 20 of 20 grpo steps are taken")
    assert resume.begin(config(True, max_steps=21), tmp_path) is None
    assert resume.begin(config(True, max_steps=None), tmp_path) is not None, "as many as it had"
    make(tmp_path, 26, number=20, is_main=False)
    assert resume.begin(config(True), tmp_path) is None, "a warm start comes before the run's own steps"


def test_a_checkpoint_that_was_changed_is_refused(tmp_path: Path) -> None:
    found = make(tmp_path, 10)
    found.config.write_text("{}")
    with pytest.raises(CheckpointError, match=r"is not as it was written:\n  config.yaml: .*\nRemove it"):
        resume.begin(config("auto"), tmp_path)


def test_a_trainer_without_checkpoints_is_refused() -> None:
    class Plain(TrainRole):
        pass

    class Saving(TrainRole):
        def save(self, path: str) -> None:
            return None

    resume.check_trainer(Saving)
    with pytest.raises(ConfigError, match=r"Plain has no checkpoints: set checkpoint\.every=null and resume=false"):
        resume.check_trainer(Plain)


def model(path: Path, weights: bytes) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "README.md").write_text(str(path))
    return str(path)


def test_models_are_known_by_their_content(tmp_path: Path) -> None:
    large = bytes(fingerprint.SAMPLES * fingerprint.SAMPLE_BYTES) * 2
    one, moved = model(tmp_path / "one", large), model(tmp_path / "moved", large)
    tuned = model(tmp_path / "tuned", large[:-1] + b"x")

    def about(train: str, teacher: str) -> dict[str, Any]:
        roles = {role: Spec(role, SimpleNamespace(model=path)) for role, path in (("train", train), ("rollout", train))}
        roles["teacher"] = Spec("teacher", SimpleNamespace(model=teacher))
        rows = Batch.from_columns({"uid": ["a", "b"], "prompt_length": [3, 4]})
        return {"models": fingerprint.of_models(roles), "data": fingerprint.of_rows(rows)}

    assert list(about(one, tuned)["models"]) == ["model", "teacher.model"]
    assert list(resume.other_content(about(one, tuned), about(moved, tuned))) == []
    assert list(resume.other_content(about(one, tuned), about(tuned, one))) == [
        f"model was {one}, and is {tuned}",
        f"teacher.model was {tuned}, and is {one}",
    ]
    assert list(resume.other_content(about(one, tuned), about(one, one))) == [
        f"teacher.model was {tuned}, and is not there"
    ]


def test_rows_are_known_by_their_names_and_lengths() -> None:
    def of(uids: list[str], lengths: list[int]) -> dict[str, Any]:
        return {"models": {}, "data": fingerprint.of_rows(Batch.from_columns({"uid": uids, "prompt_length": lengths}))}

    first = of(["a", "b"], [3, 4])
    assert list(resume.other_content(first, of(["a", "b"], [3, 4]))) == []
    assert list(resume.other_content(first, of(["b", "a"], [3, 4]))) == [
        "data had 2 rows, and has 2 of other names or lengths"
    ]
    assert list(resume.other_content(first, of(["a", "b"], [3, 5]))) != []
    assert list(resume.other_content(first, of(["a"], [3]))) == ["data had 2 rows, and has 1"]
