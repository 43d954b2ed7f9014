"""Rules on checkpoints and on going on from them."""

from __future__ import annotations

import pytest

from rolegraph.config import load
from rolegraph.errors import ConfigError
from tests.rolegraph.config.conftest import Folder

EVALUATED = ("eval=arithmetic", "rollout=vllm")
SAMPLING = ("algorithm=sampling", "sampler=vllm", "orm=functions", "reward=exact_match")


def faults(*words: str, user: Folder | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(words), config_dir=str(user) if user else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint.keep_best=1"], "checkpoint.keep_best has no effect without checkpoints: set checkpoint.every"),
        (["checkpoint.keep_last=1"], "checkpoint.keep_last has no effect without checkpoints"),
        (["checkpoint.export_hf=true"], "checkpoint.export_hf has no effect without checkpoints"),
        (["checkpoint.every=0"], "checkpoint.every: 0"),
        (
            ["checkpoint.every=5", "checkpoint.keep_best=1"],
            "checkpoint.keep_best=1 needs a metric to compare by: set checkpoint.metric",
        ),
        (
            ["checkpoint.every=5", "checkpoint.metric=loss"],
            "checkpoint.metric has no effect with keep_best=0: set checkpoint.keep_best",
        ),
        (
            ["checkpoint.every=5", "checkpoint.keep_best=1", "checkpoint.metric=loss", "checkpoint.keep_last=null"],
            "checkpoint.keep_best has no effect with keep_last=null",
        ),
        (
            ["checkpoint.every=5", "checkpoint.keep_best=1", "checkpoint.metric=eval/sums/pass@1"],
            "checkpoint.metric=eval/sums/pass@1 is of an eval set 'sums', and the run has none: choose eval=arithmetic",
        ),
        (
            ["checkpoint.every=5", "checkpoint.keep_best=1", "checkpoint.metric=eval/sums/pass@1", *EVALUATED],
            "checkpoint.metric=eval/sums/pass@1 is of an eval set 'sums', and eval.sets has arithmetic",
        ),
        (["resume=auto"], "resume=auto goes on in the folder of an earlier run: name that folder, output_dir=..."),
        (["resume='on'"], "resume: 'on' is a string: type true"),
    ],
)
def test_what_is_said_of_checkpoints_has_an_effect(words: list[str], message: str) -> None:
    assert message in faults("algorithm=sft", *words)


def test_what_makes_sense_is_taken() -> None:
    words = ["checkpoint.every=5", "checkpoint.keep_best=1", "checkpoint.metric=reward/mean", "checkpoint.best=min"]
    run = load(["algorithm=grpo", *words, "resume=auto", "output_dir=here"]).run
    load(["algorithm=grpo", *words[:2], "checkpoint.metric=eval/arithmetic/pass@1", "eval=arithmetic"])
    assert (run.checkpoint.every, run.checkpoint.keep_last, run.resume) == (5, 2, "auto")
    assert load(["algorithm=gkd", "teacher=self", "resume=/runs/one/checkpoints/step-5"]).run.resume == (
        "/runs/one/checkpoints/step-5"
    )


def test_a_sampling_run_goes_on_by_itself() -> None:
    assert load([*SAMPLING, "resume=auto", "output_dir=here"]).run.resume == "auto"
    assert "resume=there names a checkpoint, and Sampling writes none: set resume=true or auto" in faults(
        *SAMPLING, "resume=there"
    )
    assert "checkpoint.every=5 has no effect with Sampling, which goes on by resume=true without checkpoints" in faults(
        *SAMPLING, "checkpoint.every=5"
    )


def test_an_algorithm_with_a_loop_of_its_own_says_what_it_needs(user: Folder) -> None:
    user.write(
        "rolegraph_looping_code.py",
        """
        from rolegraph.algorithms.grpo import GRPO


        class Same(GRPO):
            async def step(self, batch):
                return await super().step(batch)


        class Loop(GRPO):
            async def run(self):
                pass


        class Stated(Loop):
            def state(self):
                return super().state()

            can_save = True
        """,
    )
    words = ("algorithm=grpo", "checkpoint.every=5")
    message = "checkpoint.every=5 does not work with Loop, which has a `run` of its own and no `state`"
    assert message in faults(*words, "algorithm._target_=rolegraph_looping_code.Loop", user=user)
    for name in ("Same", "Stated"):
        load([*words, f"algorithm._target_=rolegraph_looping_code.{name}"], config_dir=str(user))
