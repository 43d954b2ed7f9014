"""`rolegraph eval`: what its words mean, and the config that a checkpoint's run becomes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolegraph import cli
from rolegraph.algorithms.config import EvaluationConfig
from rolegraph.algorithms.evaluation import Evaluation
from rolegraph.checkpoints import folder
from rolegraph.config import RunConfig, load
from rolegraph.errors import ConfigError
from rolegraph.evaluation.command import checked, is_model
from rolegraph.run import save_config
from rolegraph.wiring import scorers_of
from tests.rolegraph.algorithms.fakes import World
from tests.rolegraph.evaluation.test_hook import Evaluated

EVALUATED = ("experiment=quickstart", "eval=arithmetic")


def checkpoint(run_dir: Path, *overrides: str) -> folder.Checkpoint:
    path = folder.begin(run_dir, 7)
    save_config(load(list(overrides)).run, path / "config.yaml")
    return folder.complete(path, 7, metrics={})


def of(tmp_path: Path, *overrides: str, changed: tuple[str, ...] = ()) -> RunConfig:
    return checked(checkpoint(tmp_path, *overrides), list(changed), None)


def test_a_model_is_a_folder_with_a_config_or_a_name(tmp_path: Path) -> None:
    assert is_model("Qwen/Qwen3-0.6B")
    assert not is_model(str(tmp_path)), "a run, or a checkpoint"
    (tmp_path / "config.json").write_text("{}")
    assert is_model(str(tmp_path))
    for path in ("./nothing", "/no/thing", "outputs/run/checkpoints"):
        with pytest.raises(
            ConfigError, match="is no folder: name a checkpoint, a run, or a Hugging Face folder or name"
        ):
            is_model(path)


def test_a_checkpoint_is_evaluated_as_its_run_was(tmp_path: Path) -> None:
    run = of(tmp_path, *EVALUATED, "rollout.max_num_seqs=17", "+eval.sets.own.data.seed=5")
    assert list(run.roles) == ["rollout", "orm"], "nothing is trained; the run's rewards score what has none of its own"
    assert run.roles["rollout"].config.max_num_seqs == 17
    assert (run.eval.every, list(run.eval.sets)) == (None, ["arithmetic", "own"])
    assert run.eval.sets["own"].max_completion_length == 6, "that of the run's algorithm"
    assert run.algorithm.config.model == str(tmp_path / "checkpoints" / "step-7")
    assert run.max_steps == 100, "no key of training is left"


def test_the_weights_are_those_of_the_checkpoint_whatever_models_roles_began_with(tmp_path: Path) -> None:
    began = ("rollout.model=/nvme/copy", "train.model=/nvme/other", "eval.sets.held.loss=true")
    run = of(tmp_path, *EVALUATED, *began).with_model_path("/exported")
    assert [run.roles[role].config.model for role in ("rollout", "train")] == ["/exported"] * 2
    typed = of(tmp_path / "typed", *EVALUATED, *began, changed=("rollout.model=/mine",))
    assert typed.roles["rollout"].config.model == "/mine"


def test_values_are_changed_and_sets_added(tmp_path: Path) -> None:
    words = ("eval.sets.arithmetic.n=4", "eval.sets.arithmetic.temperature=1", "rollout.replicas=2")
    run = of(tmp_path, *EVALUATED, changed=words)
    assert (run.eval.sets["arithmetic"].samples, run.roles["rollout"].config.replicas) == (4, 2)
    assert list(run.roles) == ["rollout", "eval_arithmetic"], "its own functions, beside which nobody else has work"
    bare = of(tmp_path / "bare", "experiment=quickstart", changed=("eval=arithmetic",))
    assert list(bare.eval.sets) == ["arithmetic"]
    with pytest.raises(ConfigError, match="unknown key; did you mean"):
        of(tmp_path / "typo", *EVALUATED, changed=("eval.sets.arithmetic.temprature=1",))
    with pytest.raises(ConfigError, match="nothing to evaluate: choose eval=arithmetic"):
        of(tmp_path / "none", "experiment=quickstart")


def test_a_loss_needs_the_trainer_and_no_engine(tmp_path: Path) -> None:
    run = of(tmp_path, "algorithm=sft", "eval.every=5", "eval.sets.held.loss=true", "train.lr=0.5")
    assert list(run.roles) == ["train"]
    both = of(tmp_path / "both", *EVALUATED, "eval.sets.held.loss=true")
    assert list(both.roles) == ["train", "rollout", "eval_arithmetic"], "a loss has no reward"
    with pytest.raises(ConfigError, match="arithmetic draws responses, and no role does: add rollout=vllm"):
        of(tmp_path / "more", "algorithm=sft", changed=("eval=arithmetic",))


OWN_REWARD = "eval.sets.held.reward.reward_funcs=[format]"
LONG = "eval.sets.held.max_completion_length=9"
SCORED = ("algorithm=grpo", "eval=arithmetic", "prm=functions")
OWN = "+eval.sets.own.data.seed=5"


@pytest.mark.parametrize("how", ["mean", "last", "per_step"])
def test_scores_count_as_in_the_run(tmp_path: Path, how: str) -> None:
    weights = ("algorithm.score_weights.prm=0.25", "algorithm.score_weights.orm=3")
    words = (*SCORED, f"algorithm.prm_reward={how}", *weights, OWN)
    handles: Any = dict.fromkeys(("prm", "orm"))
    trained, alone = (scorers_of(run, handles) for run in (load(list(words)).run, of(tmp_path, *words)))
    assert (alone.weights, alone.reduce) == (trained.weights, trained.reduce)
    assert alone.weights == ({"orm": 3} if how == "per_step" else {"prm": 0.25, "orm": 3})


def test_scores_of_roles_that_have_no_work_count_nowhere(tmp_path: Path) -> None:
    run = of(tmp_path, *SCORED, "algorithm.score_weights.prm=0.25", "algorithm.prm_reward=mean")
    assert list(run.roles) == ["rollout", "eval_arithmetic"]
    assert (run.algorithm.config.score_weights, run.algorithm.config.prm_reward) == ({}, None)


def test_who_stays_follows_from_the_sets_as_they_are_changed(tmp_path: Path) -> None:
    both = ("algorithm=sft", "eval=arithmetic", "rollout=vllm", "eval.sets.held.loss=true")
    assert list(of(tmp_path / "0", *both).roles) == ["train", "rollout", "eval_arithmetic"]
    assert list(of(tmp_path / "1", *both, changed=("eval.sets.arithmetic=null",)).roles) == ["train"]
    added = of(tmp_path / "2", *EVALUATED, changed=("eval.sets.held.loss=true",))
    assert list(added.roles) == ["train", "rollout", "eval_arithmetic"]
    words = ("eval.sets.held.loss=false", LONG, OWN_REWARD)
    assert list(of(tmp_path / "3", *both, changed=words).roles) == ["rollout", "eval_arithmetic", "eval_held"]
    with pytest.raises(ConfigError, match="nothing to evaluate: choose eval=arithmetic"):
        of(tmp_path / "4", *both, changed=("eval.sets.arithmetic=null", "eval.sets.held=null"))
    with pytest.raises(ConfigError, match="must be a node with keys"):
        of(tmp_path / "5", *both, changed=("eval.sets.arithmetic=5",))


def test_what_a_message_says_can_be_typed(tmp_path: Path) -> None:
    sft = ("algorithm=sft", "eval.every=5", "eval.sets.held.loss=true")
    more = of(tmp_path / "0", *sft, changed=("eval=arithmetic", "rollout=vllm", "rollout.replicas=2"))
    assert list(more.roles) == ["train", "rollout", "eval_arithmetic"]
    assert more.roles["rollout"].config.replicas == 2
    null = [f"eval.sets.arithmetic.{key}=null" for key in ("reward", "max_completion_length")]
    loss = of(tmp_path / "1", *EVALUATED, changed=("eval.sets.arithmetic.n=0", "eval.sets.arithmetic.loss=true", *null))
    assert list(loss.roles) == ["train"]
    assert list(of(tmp_path / "2", *sft, changed=("rollout=null",)).roles) == ["train"]
    scored = of(tmp_path / "3", *sft, changed=("eval.sets.held.n=1", "rollout=vllm", "reward=exact_match", LONG))
    assert list(scored.roles) == ["train", "rollout", "eval_held"]
    other = of(tmp_path / "4", *EVALUATED, changed=("rollout=huggingface",))
    assert other.roles["rollout"].name == "HuggingFaceRollout"
    with pytest.raises(ConfigError, match="data=jsonl: the config of a run has its choices made"):
        of(tmp_path / "5", *EVALUATED, changed=("data=jsonl",))


def test_a_trainer_of_losses_has_neither_adapter_nor_reference(tmp_path: Path) -> None:
    tuned = ("train.tuner_type=lora", "train.lora_rank=3", "train.lora_targets=[q_proj]", "train.reference=initial")
    run = of(tmp_path, *EVALUATED, "eval.sets.held.loss=true", *tuned, "train.lr=0.5")
    train = run.roles["train"].config
    assert (train.adapter, train.reference, train.lora_rank, train.lr) == (None, None, 16, 0.5)


def test_what_is_about_sharing_devices_goes_with_those_that_shared(tmp_path: Path) -> None:
    sharing = ("colocate_groups=[[train,rollout]]", "offload_teacher_model=false", "offload_reward_model=false")
    shared = [f"placement.{word}" for word in (*sharing, "sleep_level=1", "timeout_s=7")]
    run = of(tmp_path, *EVALUATED, *shared)
    assert (run.placement.colocated, run.placement.sleep_level, run.placement.timeout_s) == ((), 0, 7)


def test_a_model_is_a_run_without_steps(capsys: pytest.CaptureFixture[str]) -> None:
    run = load(["algorithm=evaluation", "model=hf", "model.path=org/model", "eval=arithmetic"]).run
    assert list(run.roles) == ["rollout", "eval_arithmetic"]
    assert cli.dispatch(["plan", "algorithm=evaluation", "eval=arithmetic"]) == 0
    shown = capsys.readouterr().out
    assert "eval set arithmetic │ 100 rows x 1 response of at most 8 tokens │" in shown
    with pytest.raises(ConfigError, match="train has nothing to do where no eval set has loss=true"):
        load(["algorithm=evaluation", "eval=arithmetic", "train=megatron"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval=arithmetic"], "eval=arithmetic comes after what is evaluated: type rolegraph eval CHECKPOINT|MODEL"),
        (["org/model"], "nothing to evaluate: choose eval=arithmetic, or add a set"),
        (["org/model", "eval=arithmetic", "-o", "plan.json"], "-o is for `rolegraph plan`"),
        (["org/model", "eval=arithmetic", "eval.sets.arithmetic.nn=3"], "did you mean eval.sets.arithmetic.n?"),
        (
            ["."],
            "holds no whole checkpoint: a run writes some with checkpoint.every=N (nor is it a Hugging Face folder",
        ),
    ],
)
def test_faults_of_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["eval", *words]) != 0
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "before anything starts"


async def test_the_numbers_are_in_a_file(tmp_path: Path) -> None:
    evaluated = Evaluated(every=None)
    world = World(Evaluation, EvaluationConfig(model="that one"), hooks=[evaluated.hook])
    job: Any = world.algorithm.job
    job.config.model = SimpleNamespace(path="elsewhere")
    job.telemetry.run_dir = tmp_path
    await world.run()
    assert world.calls == ["refresh at 0", "generate", "log evaluation at 0"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["model"] == "that one"
    assert results["sets"]["held_out"]["pass@1"] == 0.5
    assert evaluated.hook.table()[0] == ["evaluation", "result"]
