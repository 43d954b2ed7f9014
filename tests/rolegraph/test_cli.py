"""The command: exit codes, Hydra's own options, and what it never imports."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rolegraph import cli
from rolegraph.config import RunConfig
from rolegraph.errors import RoleGraphError, StoppedError
from tests.rolegraph.config.conftest import Folder, user  # noqa: F401 - a fixture
from tests.rolegraph.test_estimate import SIZES

HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "datasets")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """The configs that reach `rolegraph.run.main`, which starts nothing here."""
    reached: list[RunConfig] = []
    module = ModuleType("rolegraph.run")
    module.main = reached.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rolegraph.run", module)
    monkeypatch.chdir(tmp_path)
    return reached


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """One process runs the command lines one after the other, and tells after each what it has imported."""
    lines = {
        "run algorithm=grpo +algorithm.epsilonn=0.3": 2,
        "plan algorithm=grpo placement=separate train.ranks=2 rollout.replicas=2": 0,
        "plan algorithm=grpo model=smollm2_135m train.gpus=9 rollout.gpus=1 --cluster 1x8xH100-80G": 2,
        "run algorithm=grpo --cfg job": 0,
        "run --help": 0,
        "--help": 0,
    }
    program = (
        "import json, sys; from rolegraph.cli import main\n"
        f"for line in {list(lines)!r}:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as stopped: code = stopped.code or 0\n"
        f"    print('\\n' + json.dumps([line, code, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert told == [[line, code, []] for line, code in lines.items()]
    assert time.monotonic() - started < 40
    assert not list(tmp_path.iterdir()), "nothing is written before a run starts"


def test_a_fault_is_printed_without_a_traceback(
    runs: list[RunConfig], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.dispatch(["run", "algorithm=grpo", "++algorithm.epsilonn=0.3", "train.lrr=1"]) == 2
    error = capsys.readouterr().err
    assert "algorithm.epsilonn: unknown key; did you mean algorithm.epsilon?" in error
    assert "from command line: ++algorithm.epsilonn=0.3" in error
    assert "train.lr?" in error
    assert "Traceback" not in error
    assert runs == []
    assert not (tmp_path / "outputs").exists()
    cli.dispatch(["run", "algorithm=grpo", "++algorithm.epsilonn=0.3", "--traceback"])
    assert "Traceback" in capsys.readouterr().err


def test_a_run_gets_a_folder(runs: list[RunConfig], tmp_path: Path) -> None:
    assert cli.dispatch(["run", "algorithm=sft", "ray_exp_name=my run"]) == 0
    (run,) = runs
    folder = Path(str(run.output_dir))
    assert folder.parent == tmp_path / "outputs" / "my-run"
    assert folder.is_dir()
    assert run.tree["output_dir"] == run.output_dir
    assert cli.dispatch(["run", "experiment=quickstart", f"output_dir={tmp_path}/here now"]) == 0
    assert runs[1].output_dir == f"{tmp_path}/here now"
    assert cli.dispatch(["run", "algorithm=sft"]) == 0
    assert Path(str(runs[2].output_dir)).parent.name == "sft"


def test_a_run_is_composed_and_checked_once(runs: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module("rolegraph.config.load")
    check, checks = load.check, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        checks.append(args)
        return check(*args, **kwargs)

    monkeypatch.setattr(load, "check", counted)
    assert cli.dispatch(["run", "algorithm=sft", "train.lr=1e-3", "hydra.job.name=mine"]) == 0
    assert runs[0].roles["train"].config.lr == 1e-3
    assert len(checks) == 1
    assert cli.dispatch(["run", "--multirun", "algorithm=sft", "seed=1,2"]) == 0
    assert [run.seed for run in runs[1:]] == [1, 2]


def test_an_error_of_the_run_is_exit_code_1(runs: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(run: RunConfig) -> None:
        raise RoleGraphError("rank 3 of train died")

    sys.modules["rolegraph.run"].main = fail  # type: ignore[attr-defined]
    assert cli.dispatch(["run", "algorithm=sft"]) == 1
    assert capsys.readouterr().err.strip() == "rolegraph: rank 3 of train died"


def test_multirun(runs: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["run", "--multirun", "algorithm=sft", "train.lr=1e-3,1e-4", "seed=1,2"]) == 0
    assert [(run.roles["train"].config.lr, run.seed) for run in runs] == [(1e-3, 1), (1e-3, 2), (1e-4, 1), (1e-4, 2)]
    assert len({run.output_dir for run in runs}) == 4
    assert cli.dispatch(["run", "-m", "algorithm=sft", "train.dtype=float32,float31"]) == 2
    assert "train.dtype=float31" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("chekpoints", "did you mean `rolegraph checkpoints`?"),
        ("frobnicate", "the commands are run, plan, eval, checkpoints, export"),
    ],
)
def test_a_command_that_is_not_there(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch([word]) == 2
    assert hint in capsys.readouterr().out


def test_a_sweep_ends_with_the_job_that_a_signal_has_stopped(
    runs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(run: RunConfig) -> None:
        runs.append(run)
        raise StoppedError("stopped by SIGTERM: go on behind step 3 with resume=auto", signal.SIGTERM)

    sys.modules["rolegraph.run"].main = stop  # type: ignore[attr-defined]
    assert cli.dispatch(["run", "--multirun", "algorithm=sft", "seed=1,2"]) == 143
    assert [run.seed for run in runs] == [1]
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_cfg_job_prints_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["run", "algorithm=grpo", "train.lr=3e-5", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["train"]["adam_beta2"] == 0.999
    assert tree["train"]["lr"] == 3e-5
    assert tree["algorithm"]["epsilon"] == 0.2
    assert (
        cli.dispatch(["run", "algorithm=grpo", "reward=math_format", "--cfg", "job", "--resolve", "-p", "reward"]) == 0
    )
    assert yaml.safe_load(capsys.readouterr().out)["reward_funcs"][2]["max_length"] == 256


def test_help_names_groups_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "algorithm: distill, evaluation, gkd, grpo, pt, sampling, sft" in text
    assert cli.dispatch(["--help"]) == 0
    assert "rolegraph plan" in capsys.readouterr().out
    assert cli.dispatch(["rnu"]) == 2


def test_plan_shows_ranks_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        "algorithm=grpo",
        "placement=separate",
        "train.ranks=3",
        "rollout.replicas=2",
        "placement.device=cpu",
    ]
    assert cli.dispatch(argv) == 0
    text = capsys.readouterr().out
    assert "dp 2/3" in text
    assert "8 prompts x 8 samples = 64 samples" in text
    assert "21 or 22 rows (64 does not divide by 3)" in text
    assert "micro-batches by memory, of 4 rows or more" in text
    assert "100 steps, 6400 samples" in text
    assert cli.dispatch([*argv, "train.micro_batch_size=4"]) == 0
    assert "6 micro-batches a rank of at most 4 rows" in capsys.readouterr().out
    assert cli.dispatch(["plan", "algorithm=grpo", "max_steps=null", "placement.device=cpu"]) == 0
    assert "one pass over the dataset (max_steps=null)" in capsys.readouterr().out
    assert cli.dispatch(["plan", "algorithm=grpo", "train.cpus=9999", "placement.device=cpu"]) == 2
    assert "9999" in capsys.readouterr().err


GROUPS = '{"nproc_per_node": 1, "all": {"device": "cpu", "ranks": "2", "workers": ["default"]}}'


@pytest.mark.parametrize("words", [["--device_groups", GROUPS], [f"--device_groups={GROUPS}"]])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_device_groups_as_json(
    command: str, words: list[str], runs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch([command, *words, "algorithm=sft"]) == 0
    if command == "run":
        (run,) = runs
        assert run.placement.device_groups is not None
        assert run.placement.device_groups.groups[0].processes == 2
        assert run.tree["placement"]["device_groups"]["all"]["workers"] == ["default"]
    else:
        assert "dp 1/2" in capsys.readouterr().out


def test_device_groups_of_file_and_option_are_merged(user: Folder, runs: list[RunConfig]) -> None:  # noqa: F811
    user.write(
        "experiment/groups.yaml",
        "# @package _global_\nplacement:\n  device_groups: {all: {device: CPU, ranks: 2, workers: [default]}}\n",
    )
    words = ["run", "--config-dir", str(user), "algorithm=sft", "experiment=groups"]
    assert cli.dispatch([*words, "--device_groups", '{"all": {"ranks": 3}}']) == 0
    assert runs[0].placement.device_groups is not None
    assert runs[0].placement.device_groups.groups[0].processes == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"device": "CPU" "ranks": 1}}', "--device_groups is no JSON: Expecting ',' delimiter\n"),
        ("[1]", "--device_groups [1] is no JSON object"),
        ("", "--device_groups is no JSON: Expecting value"),
        ('{"a": 1, "a": 2}', "--device_groups has the key 'a' twice"),
        ('{"a b": 1}', "the name 'a b' has other characters than letters"),
        ("""{"a": {"device": "CPU", "ranks": 1, "workers": ["it's"]}}""", "the worker `it's`, which takes no part"),
        ('{"a": {"device": "CPU", "ranks": 1, "worker": []}}', "from command line: --device_groups={"),
    ],
)
def test_faulty_device_groups_on_the_command_line(
    text: str, message: str, runs: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(["run", "algorithm=sft", f"--device_groups={text}"]) == 2
    assert message in capsys.readouterr().err
    assert runs == []


def test_a_json_error_points_at_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    long = '{"a": {"device": "CPU", "ranks": 1, "workers": ["' + "x" * 90 + '"]}, oops}'
    assert cli.dispatch(["plan", "algorithm=sft", "--device_groups", long]) == 2
    *_, line, mark = capsys.readouterr().err.rstrip().splitlines()
    assert line[mark.index("^")] == "o"
    assert len(line) <= 102
    assert cli.dispatch(["plan", "algorithm=sft", "--device_groups"]) == 2
    assert "--device_groups needs its groups as JSON" in capsys.readouterr().err
    assert cli.dispatch(["plan", "algorithm=sft", "--device_groups=1", "--device_groups=2"]) == 2
    assert "--device_groups is given twice" in capsys.readouterr().err


LAYOUT = [
    "plan",
    "algorithm=grpo",
    "placement=separate",
    "train.gpus=16",
    "train.tensor_model_parallel_size=2",
    "train.pipeline_model_parallel_size=2",
    "rollout.gpus=8",
    "rollout.tensor_parallel_size=2",
]


def test_plan_for_hardware_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch([*LAYOUT, "--cluster", "4x8xH100-80G"]) == 0
    text = capsys.readouterr().out
    assert "dp 3/4 pp 1/2 tp 1/2" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["train", "8", "dp 0/4 pp 1/2 tp 0/2", "node-1", "GPU 0", "100%", "12"] in rows
    assert ["rollout", "3", "dp 3/4", "node-2", "GPU 6,7", "100%", "24"] in rows
    assert "Memory of each of 16 GPUs of train (H100), 80 GiB, estimated" in text
    assert cli.dispatch([*LAYOUT, "--cluster=1x8xH100-80G"]) == 2
    error = capsys.readouterr().err
    assert "no room for `train`: 24 GPUs are asked for, and there are 8" in error
    assert ["node-0", "8"] in [line.split() for line in error.splitlines()]


def test_a_recipe_with_a_teacher_planned_for_32_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    argv = ["plan", "experiment=gkd_rollout_colocate_teacher_standalone", "placement.colocate_groups=[]"]
    argv += ["model=hf", f"model.path={tmp_path}", "teacher=megatron", "--cluster", "4x8xH100-80G"]
    for role, gpus, key, tensor in (
        ("train", 16, "tensor_model_parallel_size", 4),
        ("rollout", 8, "tensor_parallel_size", 2),
        ("teacher", 8, "tensor_model_parallel_size", 4),
    ):
        argv += [f"{role}.gpus={gpus}", f"{role}.{key}={tensor}"]
    assert cli.dispatch([*argv, "train.pipeline_model_parallel_size=2"]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["train", "13", "dp 1/2 pp 1/2 tp 1/4", "node-1", "GPU 5", "100%", "12"] in rows
    assert ["rollout", "3", "dp 3/4", "node-2", "GPU 6,7", "100%", "24"] in rows
    assert ["teacher", "7", "dp 1/2 tp 3/4", "node-3", "GPU 7", "100%", "12"] in rows
    assert ["teacher weights", "3.81 GiB"] in rows


def test_a_large_plan_is_shown_a_row_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "algorithm=grpo", "placement=separate", "train.gpus=256", "rollout.gpus=8", "data.size=9"]
    argv += ["algorithm.global_batch_size=256", "--cluster", "33x8xH100-80G"]
    assert cli.dispatch(argv) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["train", "248-255", "dp 248-255/256", "node-31", "GPU 0-7", "100%", "12"] in rows


def test_plan_for_machines(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert cli.dispatch([*LAYOUT, "--cluster", "4x8xH100-80G", "-o", str(file)]) == 0
    plan = json.loads(file.read_text())
    assert (plan["version"], plan["device"], plan["groups"]) == (1, "cuda", [["train"], ["rollout"], ["orm"]])
    assert plan["cluster"][3]["gpu_memory"] == 80 * 2**30
    train = plan["roles"]["train"]
    assert (train["count"], train["mesh"]) == (16, {"dp": 4, "pp": 2, "tp": 2, "cp": 1, "ep": 1})
    assert train["target"] == "roles.train.megatron.MegatronTrain"
    assert train["slots"][9] == {
        "rank": 9,
        "node": "node-1",
        "device": "cuda",
        "device_ids": [1],
        "share": 1.0,
        "cores": 12.0,
        "threads": 12,
        "mesh": {"dp": 0, "pp": 1, "tp": 1, "cp": 0},
    }
    assert [len(bundles) for bundles in plan["bundles"]] == [16, 8, 0]
    assert plan["arithmetic"]["samples_per_generation"] == 64
    assert plan["arithmetic"]["rows_per_rank"] == [16, 16]
    needs = {tuple(need["roles"]): need for need in plan["memory"]["devices"]}
    assert needs["train",]["phases"]["train"]["train"].keys() == {"weights", "gradients", "optimizer", "activations"}
    assert plan["memory"]["unknown"] == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cluster"], "--cluster needs a value, as in --cluster 2x8xH100-80G"),
        (["--cluster", "-o", "x"], "--cluster needs a value"),
        (["-o"], "-o needs a value, as in -o plan.json"),
        (["-o", "a", "-o=b"], "-o is given twice"),
        (["--cluster", "1x16"], "the kind of devices is missing"),
        (["-o", "/nowhere/plan.json"], "-o /nowhere/plan.json: the plan cannot be written there: No such file"),
    ],
)
def test_options_of_a_plan(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", "algorithm=grpo", "placement.device=cpu", *words]) == 2
    assert expected in capsys.readouterr().err


def test_roles_without_room_are_refused_before_ray_starts(
    runs: list[RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rolegraph.cluster.finds_cluster", lambda: False)
    argv = ["run", "algorithm=sft", "train.ranks=2", "train.cpus=4000", "placement.device=cpu"]
    assert cli.dispatch(argv) == 2
    assert "no room for `train`: the cores of the nodes do not suffice. Lower train.cpus" in capsys.readouterr().err
    assert runs == []
    assert list(tmp_path.iterdir()) == []
    # A cluster that the run would join may be larger than this machine.
    monkeypatch.setattr("rolegraph.cluster.finds_cluster", lambda: True)
    assert cli.dispatch(argv) == 0
    assert len(runs) == 1


def test_a_run_takes_the_machines_it_finds(runs: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["run", "algorithm=sft", "--cluster=1x8xH100"]) == 2
    assert "--cluster is for `rolegraph plan`" in capsys.readouterr().err
    assert runs == []


@pytest.mark.parametrize("words", [["--multirun"], ["--cfg", "job"], ["--config-path", "somewhere"]])
def test_options_that_a_plan_does_not_have_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", "algorithm=grpo", *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_users_folder(user: Folder, runs: list[RunConfig]) -> None:  # noqa: F811
    assert cli.dispatch(["run", "--config-dir", str(user), "algorithm=mine", "seed=4"]) == 0
    assert runs[0].algorithm.target == "rolegraph_user_code.Mine"
    assert runs[0].python_path == (str(user),)
    assert cli.dispatch(["run", "--config-dir", f"{user}/nowhere", "algorithm=mine"]) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rolegraph ", {"run", "plan"}),
        ("rolegraph pl", {"plan"}),
        ("rolegraph ev", {"eval"}),
        ("rolegraph eval outputs/run rollout=", {"rollout=vllm", "rollout=huggingface"}),
        ("rolegraph run algorithm=", {"algorithm=grpo", "algorithm=sft", "algorithm=pt"}),
        ("rolegraph plan algorithm=grpo mode", {"model="}),
    ],
)
def test_tab_completion(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert cli.dispatch(["-sc", "query=bash"]) == 0
    assert expected <= set(capsys.readouterr().out.split())
