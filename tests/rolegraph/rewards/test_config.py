"""Reward configs are checked by reading source: each rule broken once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolegraph.rewards.config import FunctionSpec, RewardConfig

PLUGIN = str(Path(__file__).with_name("faulty.py"))


def test_functions_have_targets_settings_names_and_weights() -> None:
    config = RewardConfig(
        reward_funcs=[
            "exact_match",
            "faulty.faulty",
            {"_target_": "regex", "pattern": "a", "name": "has_a"},
        ],
        reward_weights=[1, 0.5, -1],
        external_plugins=[PLUGIN],
    )
    assert config.functions() == (
        FunctionSpec("exact_match", {}, "exact_match", 1.0),
        FunctionSpec("faulty.faulty", {}, "faulty", 0.5),
        FunctionSpec("regex", {"pattern": "a"}, "has_a", -1.0),
    )
    assert [spec.weight for spec in RewardConfig(reward_funcs=["format", "regex"]).functions()] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": []}, "reward.reward_funcs is empty: name at least one"),
        (
            {"reward_funcs": ["exact_macth"]},
            "no reward function is called 'exact_macth'; did you mean 'exact_match'?",
        ),
        ({"reward_funcs": ["format", 3]}, "reward.reward_funcs[1]: 3 is neither"),
        ({"reward_funcs": [{"func": "format"}]}, "a node needs `_target_`"),
        ({"reward_funcs": [{"_target_": "format", "name": 3}]}, "`name` must be a string"),
        ({"reward_funcs": ["format", "format"]}, "two functions are called 'format'"),
        ({"reward_funcs": [{"_target_": "regex", "patern": "a"}]}, "no setting 'patern'; did you mean 'pattern'?"),
        ({"reward_funcs": [{"_target_": "regex", "pattern": "("}]}, "is no regular expression"),
        ({"reward_funcs": [{"_target_": "regex", "pattern": "a", "mode": "match"}]}, "mode='match' is none of search"),
        ({"reward_funcs": [{"_target_": "exact_match", "extract_from": "box"}]}, "extract_from='box' is none of auto"),
        ({"reward_funcs": ["soft_overlong"]}, "both are needed, in tokens"),
        ({"reward_funcs": [{"_target_": "soft_overlong", "max_length": 4, "cache": 8}]}, "0 < cache <= max_length"),
        ({"reward_funcs": ["nosuchmodule.f"]}, "there is no module 'nosuchmodule'"),
        ({"reward_funcs": ["faulty.fault"], "external_plugins": [PLUGIN]}, "did you mean 'faulty'?"),
        (
            {"reward_funcs": [{"_target_": "faulty", "scales": 2}], "external_plugins": [PLUGIN]},
            "faulty has no setting 'scales'; did you mean 'scale'?",
        ),
        (
            {"reward_funcs": [{"_target_": "lengths", "response_ids": 2}], "external_plugins": [PLUGIN]},
            "lengths: 'response_ids' is given by the run",
        ),
        ({"reward_funcs": ["format"], "external_plugins": ["nowhere.py"]}, "there is no file 'nowhere.py'"),
        ({"reward_funcs": ["format"], "external_plugins": ["nosuchmodule"]}, "there is no module 'nosuchmodule'"),
        ({"reward_funcs": ["format"], "reward_weights": [1, 2]}, "has 2 numbers for 1 reward_funcs"),
        ({"reward_funcs": ["format"], "timeout_s": 0}, "reward.timeout_s=0 must be more than 0 seconds"),
        ({"reward_funcs": ["format"], "workers": 0}, "reward.workers=0 must be at least 1"),
    ],
)
def test_a_problem_names_its_key_and_what_to_type(options: dict[str, Any], message: str) -> None:
    problems = RewardConfig(**options).problems()
    assert len(problems) == 1
    assert message in problems[0]
    assert problems[0].startswith("reward.")
    with pytest.raises(ValueError):
        RewardConfig(**options).functions()


def test_a_syntax_error_in_a_plugin_names_its_line(tmp_path: Path) -> None:
    plugin = tmp_path / "bad.py"
    plugin.write_text("x = 1\ndef f(:\n")
    problems = RewardConfig(reward_funcs=["format"], external_plugins=[str(plugin)]).problems()
    assert len(problems) == 1
    assert "bad.py, line 2" in problems[0]


def test_a_name_that_a_plugin_may_register_in_its_own_way_is_left_to_the_start(tmp_path: Path) -> None:
    plugin = tmp_path / "dynamic.py"
    plugin.write_text("from rolegraph.rewards import reward\nfor n in 'ab': reward(n)(lambda completions: [])\n")
    assert RewardConfig(reward_funcs=["a"], external_plugins=[str(plugin)]).problems() == []


def test_checking_imports_nobodys_module(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("raise SystemExit('imported')\ndef judge(completions, *, answer): ...\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from rolegraph.rewards.config import RewardConfig; import roles.orm.config\n"
        "assert RewardConfig(reward_funcs=['heavy.judge', 'math_equivalence']).problems() == []\n"
        "heavy = {'heavy', 'math_verify', 'sympy', 'reasoning_gym', 'torch', 'ray', 'transformers', 'tokenizers'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
