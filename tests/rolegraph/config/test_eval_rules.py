"""Eval sets in a config: what they take over from the run, which roles score them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rolegraph.config import load
from rolegraph.config.schema import RunConfig
from rolegraph.errors import ConfigError

GRPO = ("algorithm=grpo", "eval=arithmetic")
SFT = ("algorithm=sft", "eval=arithmetic", "rollout=vllm")
HARD = "eval.sets.hard"
TASK = ("eval.sets.hard.data={source: reasoning_gym, task: chain_sum}",)


def checked(*overrides: str) -> RunConfig:
    return load(list(overrides)).run


def faults(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return str(caught.value)


def test_a_set_changes_keys_of_the_runs_data() -> None:
    run = checked(*GRPO, "data.system_prompt=Add.", "data.limit=7", "data.shuffle=false", f"{HARD}.data.seed=9")
    own, data = run.eval.sets["hard"].data, run.data
    assert (own.seed, own.task, own.system_prompt) == (9, data.task, "Add.")
    assert (own.limit, own.shuffle, own.size) == (None, True, data.size)
    assert run.eval.sets["arithmetic"].data.seed == 1_000_000
    assert run.tree["eval"]["sets"]["hard"]["data"]["task"] == "chain_sum", "the run's folder keeps all of it"


def test_another_source_takes_over_what_is_not_about_a_source() -> None:
    run = checked(
        *GRPO, "data.system_prompt=Add.", f"{HARD}.data.source=jsonl", f"{HARD}.data.path=hard.jsonl", "data.size=50"
    )
    own = run.eval.sets["hard"].data
    assert (own.source, own.path, own.task, own.task_config, own.size) == ("jsonl", "hard.jsonl", None, {}, 1000)
    assert (own.system_prompt, own.max_length) == ("Add.", 64)


def test_settings_of_a_task_are_changed_one_by_one() -> None:
    three = checked(*GRPO, f"{HARD}.data.task_config.max_terms=3").eval.sets["hard"].data
    assert three.task_config == {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    other = checked(*GRPO, f"{HARD}.data.task=basic_arithmetic").eval.sets["hard"].data
    assert (other.source, other.task_config) == ("reasoning_gym", {})


def test_null_leaves_a_set_out() -> None:
    assert list(checked(*GRPO, f"{HARD}.n=1", "eval.sets.arithmetic=null").eval.sets) == ["hard"]


def test_the_groups_set_composes_for_every_algorithm_that_trains() -> None:
    run = checked(*SFT)
    assert run.roles["rollout"].config.max_model_len == 64 + 8
    assert list(checked(*GRPO).roles) == ["train", "rollout", "orm"], "whose functions are the set's"


def test_engines_have_room_for_the_longest_set() -> None:
    assert checked(*GRPO).roles["rollout"].config.max_model_len == 64 + 256
    run = checked(*GRPO, f"{HARD}.data.max_length=300", f"{HARD}.max_completion_length=40")
    assert run.roles["rollout"].config.max_model_len == 340
    assert (
        "rollout.max_model_len=330 is less than eval.sets.hard.data.max_length=300 + "
        "eval.sets.hard.max_completion_length=40"
    ) in faults(*GRPO, f"{HARD}.data.max_length=300", f"{HARD}.max_completion_length=40", "rollout.max_model_len=330")
    assert "eval.sets.hard.data.max_length=900000" in faults(*GRPO, f"{HARD}.data.max_length=900000")
    loss = ("algorithm=sft", "eval.every=1", f"{HARD}.loss=true")
    assert "eval.sets.hard.data.max_length=900000" in faults(*loss, f"{HARD}.data.max_length=900000")
    assert "data.max_length=900000 tokens" in faults(*loss, "data.max_length=900000", f"{HARD}.data.max_length=9")


def test_functions_of_a_sets_own_have_a_role() -> None:
    exact = "reward.reward_funcs=[exact_match]"
    run = checked(*GRPO, f"{HARD}.{exact}", f"eval.sets.same.{exact}", "eval.sets.other.n=1")
    assert [role for role in run.roles if role.startswith("eval_")] == ["eval_hard"], "one for sets that share them"
    assert run.roles["eval_hard"].config.reward.reward_funcs == ["exact_match"]
    assert run.roles["eval_hard"].config.never_on_gpu
    assert list(checked(*GRPO, f"{HARD}.n=1").roles) == ["train", "rollout", "orm"], "null: the run's own"


def test_the_runs_reward_scores_sets_where_no_role_does() -> None:
    words = ("algorithm=sft", "rollout=vllm", "reward=reasoning_gym", "eval.every=5", f"{HARD}.max_completion_length=8")
    assert checked(*words).roles["eval_hard"].config.reward.reward_funcs == ["reasoning_gym"]
    assert "no role runs reward functions" in faults(*words, f"{HARD}.reward.reward_funcs=[exact_match]")


def test_distillation_without_samples_of_its_own_may_have_engines_for_evaluation() -> None:
    gkd = ("algorithm=gkd", "teacher=self", "algorithm.lmbda=0")
    assert "rollout" in checked(*gkd, "eval=arithmetic").roles
    assert "GKD draws no samples here, and no eval set does: set rollout=null" in faults(*gkd)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=grpo", "eval.every=5"), "eval.every=5 has no set to evaluate: choose eval=arithmetic"),
        ((*GRPO, "eval.every=null"), "eval.sets has arithmetic, and eval.every is null: set eval.every=20"),
        (("algorithm=grpo", "eval.evry=5"), "eval.evry: unknown key; did you mean eval.every?"),
        ((*GRPO, f"{HARD}.temprature=1"), f"{HARD}.temprature: unknown key; did you mean {HARD}.temperature?"),
        ((*GRPO, f"{HARD}.data.pth=x"), f"{HARD}.data.pth: unknown key; did you mean {HARD}.data.path?"),
        ((*GRPO, f"{HARD}.data.path=x"), f"{HARD}.data.path is not for {HARD}.data.source=reasoning_gym"),
        ((*GRPO, f"{HARD}.data.shuffle=false"), f"{HARD}.data.shuffle=false has no effect"),
        ((*GRPO, f"{HARD}.reward.reward_funcs=[exact_mtch]"), f"{HARD}.reward.reward_funcs[0]: no reward function"),
        ((*GRPO, f"{HARD}.n=4"), f"{HARD}.n=4 at temperature=0 draws the same response 4 times"),
        ((*GRPO, f"{HARD}.top_p=0.9"), f"{HARD}.top_p has no effect at temperature=0"),
        ((*GRPO, f"{HARD}.metrics=[pass@8]"), f"{HARD}.metrics[0]: pass@8 needs 8 responses a prompt"),
        ((*GRPO, f"{HARD}.metrics=[best@1]"), f"{HARD}.metrics[0]: 'best@1' is no metric: write pass@K or mean@K"),
        ((*GRPO, f"{HARD}.metrics=[pass@1,pass@1]"), f"{HARD}.metrics[1]: pass@1 is there twice"),
        ((*GRPO, f"{HARD}.metrics=[]"), f"{HARD}.metrics is empty"),
        ((*GRPO, f"{HARD}.n=0"), f"{HARD}.n=0 measures nothing"),
        ((*GRPO, f"{HARD}.loss=true", f"{HARD}.temperature=1"), f"{HARD}.temperature has no effect where no responses"),
        ((*GRPO, f"{HARD}.loss=true", f"{HARD}.reward.reward_funcs=[exact_match]"), f"{HARD}.reward has no effect"),
        ((*GRPO, f"{HARD}.temperature=3"), f"{HARD}.temperature=3: vLLM samples at 2 at most"),
        ((*GRPO, "eval.sets._a.n=1"), "eval.sets has a set '_a'"),
        (("algorithm=sft", "eval=arithmetic"), "eval.sets.arithmetic draws responses, and no role does: add rollout="),
        ((*SFT, "eval.sets.arithmetic.reward=null"), "eval.sets.arithmetic has no reward functions"),
        (
            (*SFT, "eval.sets.arithmetic.max_completion_length=null"),
            "eval.sets.arithmetic.max_completion_length is null, and SFT has no such length",
        ),
        (("algorithm=sft", "rollout=vllm"), "rollout has nothing to do: SFT draws no samples here"),
        (("algorithm=sampling", "eval=arithmetic"), "eval.sets evaluates a policy under training, and Sampling trains"),
        (
            ("algorithm=pt", "data=jsonl", "data.path=x", "eval.every=1", f"{HARD}.loss=true", *TASK),
            "eval.sets.hard.loss=true reads a column `text`",
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], message: str) -> None:
    assert message in faults(*overrides)


def test_defaults_of_a_set() -> None:
    def of(**settings: Any) -> list[str]:
        words = [f"{HARD}.{key}={value}" for key, value in settings.items()]
        return [str(each) for each in checked(*GRPO, *words).eval.sets["hard"].measures]

    assert of(n=1) == ["pass@1"]
    assert of(n=8, temperature=1) == ["pass@1", "pass@8"]
    assert of(n=8, temperature=1, metrics="[mean@8,pass@4]") == ["mean@8", "pass@4"]
    assert of(loss="true") == []
    assert of(loss="true", n=1) == ["pass@1"]


STEPS = ("algorithm=grpo", "prm=functions")
PER_STEP = "algorithm.prm_reward=per_step"
PART = "set eval.sets.own.reward.reward_funcs=[exact_match], or orm=functions"


def test_scores_of_steps_alone_measure_no_response() -> None:
    own = ("eval.every=5", "eval.sets.own.n=1")
    none = ("orm=null", "reward=null")
    assert PART in faults(*STEPS, PER_STEP, *own, *none)
    for works in (
        (*none, "eval.sets.own.reward.reward_funcs=[exact_match]"),
        ("orm=functions",),
        (*none, "algorithm.prm_reward=mean"),
        (*none, "eval.sets.own.n=0", "eval.sets.own.loss=true"),
    ):
        checked(*STEPS, PER_STEP, *own, *works)
