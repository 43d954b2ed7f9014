"""Configs that runs kept, read back: the same run, with the changes that were asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rolegraph.config import RunConfig, load, load_saved
from rolegraph.errors import ConfigError
from rolegraph.run import save_config

RUNS = {
    "quickstart": ["experiment=quickstart"],
    "grpo": [
        "algorithm=grpo",
        "train.lr=3e-5",
        "reward.reward_funcs=[math_equivalence]",
        "reward.reward_weights=[2.0]",
    ],
    "gkd": ["algorithm=gkd", "teacher=vllm", "algorithm.gkd_logits_topk=8", "model@teacher.model=smollm2_135m"],
    "evaluated": ["algorithm=grpo", "eval=arithmetic", "eval.sets.hard.data.seed=5", "eval.sets.hard.loss=true"],
    "self": ["algorithm=gkd", "teacher=self"],
    "sft": ["algorithm=sft", "data=jsonl", "data.path=[a.jsonl,b.jsonl]"],
}


def kept(folder: Path, overrides: list[str]) -> tuple[RunConfig, Path]:
    run = load(overrides).run
    path = folder / "config.yaml"
    save_config(run, path)
    return run, path


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    run, path = kept(tmp_path, RUNS[name])
    again = load_saved(path).run
    assert replace(again, tree={}) == replace(run, tree={})


def test_values_are_changed_as_on_the_command_line(tmp_path: Path) -> None:
    _, path = kept(tmp_path, RUNS["quickstart"])
    run = load_saved(path, ["train.lr=0.5", "max_steps=3", "data.question_format=a {question}, b"]).run
    assert (run.roles["train"].config.lr, run.max_steps) == (0.5, 3)
    assert run.data.question_format == "a {question}, b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", r"train\.lrr: unknown key; did you mean train\.lr\?\n.*command line: train\.lrr=1"),
        ("train=megatron", "has its choices made, and takes KEY=VALUE alone"),
        ("train.lr=abc", r"train\.lr"),
    ],
)
def test_what_a_saved_config_does_not_take(tmp_path: Path, override: str, message: str) -> None:
    _, path = kept(tmp_path, RUNS["quickstart"])
    with pytest.raises(ConfigError, match=message):
        load_saved(path, [override])


def test_a_fault_of_the_file_is_told_by_its_line(tmp_path: Path) -> None:
    _, path = kept(tmp_path, RUNS["quickstart"])
    text = path.read_text().replace("max_completion_length: 6", "max_completion_length: six")
    path.write_text(text)
    line = 1 + next(i for i, each in enumerate(text.splitlines()) if "max_completion_length: six" in each)
    with pytest.raises(ConfigError, match=rf"algorithm\.max_completion_length.*\n.*config\.yaml:{line}"):
        load_saved(path)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_saved(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_saved(tmp_path / "gone.yaml")
