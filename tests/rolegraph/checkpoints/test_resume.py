"""From where a run goes on, and what is refused before it does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

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


@dataclass(frozen=True)
class Config:
    """What of a `RunConfig` is looked at."""

    resume: Any
    tree: dict[str, Any]
    max_steps: int | None
    algorithm: Spec


def config(now: Any, *, max_steps: int | None = 20, draws: bool = True, **changes: Any) -> Any:
    tree = {**TREE, "max_steps": max_steps, "resume": now, **changes}
    return Config(now, tree, max_steps, Spec("grpo", SimpleNamespace(draws_samples=draws)))


def make(
    run_dir: Path, step: int, *, number: int | None = None, is_main: bool = True, tree: dict[str, Any] = TREE
) -> folder.Checkpoint:
    path = folder.begin(run_dir, step)
    at = {"stage": "grpo", "number": step if number is None else number, "of": 20, "is_main": is_main}
    (path / "driver.json").write_text(json.dumps({"at": at}))
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
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


def begun(run_dir: Path, now: Any, start: folder.Checkpoint | None, *, metrics: str = '{"step": 11}\n') -> None:
    """What a run leaves that was killed before its first checkpoint."""
    run_dir.mkdir(exist_ok=True)
    kept = resume.as_kept(config(now), start, run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(kept.tree))
    (run_dir / "metrics.jsonl").write_text(metrics)


@pytest.mark.parametrize("metrics", ['{"step": 11}\n', ""])
def test_a_run_that_began_from_another_and_was_killed_begins_from_there_once_more(metrics: str, tmp_path: Path) -> None:
    one, branch = tmp_path / "one", tmp_path / "branch"
    origin = make(one, 10)
    begun(branch, str(one), origin, metrics=metrics)
    assert resume.kept_settings(branch)["resume"] == str(origin.path)  # type: ignore[index]
    make(one, 20)
    for now in ("auto", str(origin.path)):
        assert resume.start_of(config(now), branch) == origin, now
    if metrics:
        assert resume.start_of(config(str(one)), branch) == origin, "and not from what the other run has by now"
    again = config("auto")
    assert resume.as_kept(again, origin, branch).tree["resume"] == str(origin.path), "nor is it forgotten"
    with pytest.raises(ConfigError, match=rf"resume=auto begins from {origin.path} once more"):
        resume.start_of(config(True), branch)
    own = make(branch, 15)
    assert resume.start_of(config("auto"), branch) == own
    assert resume.as_kept(again, own, branch) is again
    folder.remove(own.path)
    folder.remove(origin.path)
    with pytest.raises(CheckpointError, match=r"began from \S+step-10, and has no checkpoint .*new output_dir"):
        resume.start_of(config("auto"), branch)


def test_a_run_that_began_from_another_is_not_gone_over_by_a_third(tmp_path: Path) -> None:
    origin = make(tmp_path / "one", 10)
    begun(tmp_path / "branch", str(origin.path), origin)
    third = make(tmp_path / "two", 5)
    with pytest.raises(ConfigError, match=r"holds a run already: choose another folder, or remove that one$"):
        resume.start_of(config(str(third.path)), tmp_path / "branch")


def test_metrics_without_a_checkpoint_are_gone_over_only_when_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert resume.begin(config("auto"), tmp_path) is None
    with pytest.raises(ConfigError, match=r"holds a run already: choose another folder, or remove that one$"):
        resume.begin(config(False), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert resume.begin(config(False), tmp_path) is None, "one that was killed before its first step left nothing"


def test_metrics_of_a_run_without_checkpoints_are_kept_and_those_of_another_run_left_alone(tmp_path: Path) -> None:
    begun(tmp_path, False, None)
    assert resume.begin(config("auto", placement={}), tmp_path) is None
    with pytest.raises(ConfigError) as caught:
        resume.begin(config("auto", seed=3), tmp_path)
    first, *lines, last = str(caught.value).splitlines()
    assert first == f"resume=auto: output_dir={tmp_path} holds a run without checkpoints that has other settings:"
    assert lines == ["  seed was 0, and is 3"]
    assert last == "Choose another folder, or remove that one"
    (tmp_path / "metrics-1.jsonl").write_text("")
    assert resume.put_aside(tmp_path) == tmp_path / "metrics-2.jsonl"
    assert (tmp_path / "metrics-2.jsonl").read_text() == '{"step": 11}\n'
    assert resume.put_aside(tmp_path) is None


def test_a_checkpoint_that_cannot_be_read_is_not_gone_over(tmp_path: Path) -> None:
    (make(tmp_path, 10).path / folder.MARKER).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resume.begin(config("auto"), tmp_path)


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


def test_an_end_of_the_schedule_is_compared_by_what_it_is() -> None:
    def changed(one: dict[str, Any], other: dict[str, Any], steps: int | None = 30) -> list[str]:
        train = {**TREE["train"], "lr_schedule": "linear"}
        now = {**TREE, "max_steps": steps, "train": {**train, **other}}
        return list(resume.differences({**TREE, "train": {**train, **one}}, now))

    assert changed({}, {"decay_steps": 20}) == [], "as the message above says"
    assert changed({"decay_steps": 30}, {}) == []
    assert changed({"decay_steps": 20}, {"decay_steps": 20}, None) == []
    assert changed({}, {"decay_steps": 25}) == ["train.decay_steps was 20, and is 25"]
    assert changed({"decay_steps": 20}, {}) == ["train.decay_steps was 20, and is 30"]


def test_speed_and_places_may_change_and_what_is_computed_may_not() -> None:
    reward = {"reward_funcs": ["exact_match"], "external_plugins": ["one/plugin.py"], "workers": None, "timeout_s": 20}
    train = {**TREE["train"], "megatron": {"recompute_granularity": "full", "gelu": 1}, "gradient_checkpointing": True}
    judge = {"_target_": "judge", "model": None, "service": {"base_url": "http://a/v1", "model": "m", "timeout_s": 60}}
    tree = {**TREE, "reward": reward, "train": train, "orm": judge}

    def changed(node: str, **keys: Any) -> list[str]:
        return list(resume.differences(tree, {**tree, node: {**tree[node], **keys}}))

    quick = {"workers": 4, "async_workers": 2, "rows_per_call": 8, "timeout_s": 5, "start_timeout_s": 60}
    assert changed("reward", **quick, external_plugins=["/two/plugin.py"]) == []
    assert changed("reward", external_plugins=["one/other.py"]) != []
    assert changed("train", megatron={"gelu": 1}, gradient_checkpointing=False) == []
    assert changed("train", megatron={"gelu": 2}) == ["train.megatron.gelu was 1, and is 2"]
    assert changed("rollout", enforce_eager=True, max_num_seqs=8, enable_prefix_caching=False) == []
    assert changed("rollout", dtype="bfloat16") == ["rollout.dtype was float32, and is bfloat16"]
    assert changed("rollout", engine_kwargs={"quantization": "fp8"}) != []
    assert changed("orm", service={**judge["service"], "base_url": "http://b/v1", "timeout_s": 9}) == []
    assert changed("orm", service={**judge["service"], "model": "n"}) == ["orm.service.model was m, and is n"]


def test_roles_that_only_evaluate_may_come_and_go(tmp_path: Path) -> None:
    trained = {key: node for key, node in TREE.items() if key != "rollout"}
    make(tmp_path, 10, tree=trained)
    more = {"orm": {"_target_": "functions"}, "reward": {"reward_funcs": ["exact_match"]}, "eval": {"every": 5}}
    assert resume.begin(config(True, draws=False, **more), tmp_path) is None
    with pytest.raises(ConfigError, match=r"rollout\.dtype was not there, and is float32"):
        resume.begin(config(True, **more), tmp_path)


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    make(tmp_path, 25, number=20)
    said = resume.begin(config(True), tmp_path)
    assert said is not None
    assert said.startswith("finished already: 20 of 20 grpo steps are taken")
    assert resume.begin(config(True, max_steps=21), tmp_path) is None
    assert resume.begin(config(True, max_steps=None), tmp_path) is None, "a pass over the data may be longer"
    make(tmp_path / "whole", 20, tree={**TREE, "max_steps": None})
    said = resume.begin(config(True, max_steps=None), tmp_path / "whole")
    assert said is not None
    assert said.startswith("finished already: 20 of 20 grpo steps are taken")
    assert said.endswith("has them (max_steps=N above that goes on)")
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

    def about(train: str, teacher: str, *, draws: bool = True, **more: str) -> dict[str, Any]:
        named = {"train": train, "rollout": train, "teacher": teacher, **more}
        roles = {role: Spec(role, SimpleNamespace(model=path)) for role, path in named.items()}
        run: Any = SimpleNamespace(roles=roles, algorithm=config(1, draws=draws).algorithm)
        return {"models": fingerprint.of_models(run)}

    assert list(about(one, tuned)["models"]) == ["model", "teacher.model"]
    assert list(resume.other_content(about(one, tuned), about(moved, tuned))) == []
    assert list(resume.other_content(about(one, tuned), about(tuned, one))) == [
        f"model was {one}, and is {tuned}",
        f"teacher.model was {tuned}, and is {one}",
    ]
    assert list(resume.other_content(about(one, tuned), about(one, one))) == [
        f"teacher.model was {tuned}, and is not there"
    ]

    first, second = (about(one, tuned, orm=name) for name in ("judge-1", "judge-2"))
    assert list(resume.other_content(first, second)) == ["orm.model was judge-1, and is judge-2"]
    assert list(about(one, tuned, draws=False, orm=tuned)["models"]) == ["model", "teacher.model"], "orm evaluates"


def test_models_are_compared_before_there_is_data_and_both_before_anything_is_changed(tmp_path: Path) -> None:
    path = folder.begin(tmp_path, 5)
    about = {"models": {"model": {"path": "m", "sha256": "1"}}, "data": {"rows": 2, "sha256": "2"}}
    (path / "driver.json").write_text(json.dumps({"about": about}))
    found = folder.complete(path, 5, metrics={})
    resume.refuse_others(None, {})
    resume.refuse_others(found, {"models": about["models"]})
    resume.refuse_others(found, about)
    with pytest.raises(CheckpointError, match=r"is of another run:\n  model was m, and is n\nGive it the same"):
        resume.refuse_others(found, {"models": {"model": {"path": "n", "sha256": "3"}}})
    with pytest.raises(CheckpointError, match=r"\n  data had 2 rows, and has 2 of other content\n"):
        resume.refuse_others(found, {**about, "data": {"rows": 2, "sha256": "3"}})
    with pytest.raises(CheckpointError, match=r"\n  data had 2 rows, and has 1\n"):
        resume.refuse_others(found, {**about, "data": {"rows": 1, "sha256": "3"}})
