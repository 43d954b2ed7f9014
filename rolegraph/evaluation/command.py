"""`rolegraph eval`: eval sets answered by a model, or by what a run's checkpoint holds."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rolegraph.checkpoints import folder
from rolegraph.errors import CheckpointError, ConfigError
from rolegraph.role import is_scorer

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig

TARGET = "rolegraph.algorithms.evaluation.Evaluation"
USAGE = """rolegraph eval CHECKPOINT [KEY=VALUE ...] [--config-dir DIR]
rolegraph eval MODEL [CHOICES] [KEY=VALUE ...] [--config-dir DIR]

  CHECKPOINT   a checkpoint (RUN/checkpoints/step-N), or the folder of a run, for its newest one. Eval sets, engines
               and rewards are those of its run, changed by KEY=VALUE; eval=NAME adds sets, and a role or reward
               (rollout=vllm, orm=functions, reward=exact_match) is chosen anew
  MODEL        a Hugging Face folder or name. Eval sets are chosen, as in eval=arithmetic, or given, as in
               eval.sets.mine.data.source=jsonl eval.sets.mine.data.path=mine.jsonl; what a set does not say of its data
               is that of `data`

Prints a table, and writes results.json and every answer (Parquet) into output_dir (null: outputs/evaluation/TIME).
"""
FOR_RUNS = ("checkpoint", "logger", "max_steps", "output_dir", "ray_exp_name", "resume")
"""Keys that have no say where nothing is trained."""
OF_TRAINING = ("model", "reference", "tuner_type")
"""Keys of `train` and `rollout` that an evaluation has no use for, beside those of an adapter."""
OF_SHARING = ("colocate_groups", "device_groups", "sleep_level")
"""Keys of `placement` about roles of the run, beside those that begin with `offload_`."""


def command(
    words: Sequence[str],
    *,
    parse: Callable[[Sequence[str]], Namespace],
    run: Callable[[list[str]], int],
    refuse: Callable[[RunConfig], None],
) -> int:
    """The command line behind `rolegraph eval`.

    `parse` reads options and overrides, `run` is `rolegraph run`, `refuse` raises where a run has no room here.
    """
    args = parse(words)
    if args.help or not args.overrides:
        print(USAGE)
        return 0
    what, *overrides = args.overrides
    if "=" in what:
        raise ConfigError(f"{what} comes after what is evaluated: type rolegraph eval CHECKPOINT|MODEL {what}")
    if is_model(what):
        options = [word for word in words if word not in args.overrides]
        return run(["algorithm=evaluation", "model=hf", f"model.path={what}", *overrides, *options])
    try:
        checkpoint = folder.resolve(what)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (nor is it a Hugging Face folder, which has a config.json)") from error
    evaluate_checkpoint(checkpoint, overrides, config_dir=args.config_dir, refuse=refuse)
    return 0


def is_model(what: str) -> bool:
    """Whether a Hugging Face folder or name is meant; raises ConfigError for a path where nothing is."""
    path = Path(what).expanduser()
    if path.is_dir():
        return (path / "config.json").is_file()
    if what.count("/") > 1 or what[0] in "./~":
        raise ConfigError(f"{what} is no folder: name a checkpoint, a run, or a Hugging Face folder or name")
    return True


def evaluate_checkpoint(
    checkpoint: folder.Checkpoint,
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    refuse: Callable[[RunConfig], None],
) -> None:
    """Check first; then take the weights out of the checkpoint, where it has no Hugging Face folder, and evaluate."""
    from rolegraph.models.config import ModelConfig
    from rolegraph.run import main as run_main

    run = checked(checkpoint, overrides, config_dir)
    refuse(run)
    out = Path(run.output_dir or f"outputs/evaluation/{time.strftime('%Y-%m-%d_%H-%M-%S')}").absolute()
    run = replace(run, output_dir=str(out), tree={**run.tree, "output_dir": str(out)})
    if checkpoint.hf.is_dir():
        run_main(replace(run, model=ModelConfig(path=str(checkpoint.hf))))
        return
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".model-", dir=out) as place:
        model = Path(place) / "hf"
        _export(checkpoint, model, config_dir)
        run_main(replace(run, model=ModelConfig(path=str(model))))


def checked(checkpoint: folder.Checkpoint, overrides: Sequence[str], config_dir: str | None) -> RunConfig:
    """The evaluation of a checkpoint, by the config of its run and what changes it; ConfigError as for a run."""
    from rolegraph.config.compose import read_saved
    from rolegraph.config.load import ROLES, add_to_path, composed, load_saved

    add_to_path(config_dir)
    more_sets: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    values: list[str] = []
    for word in overrides:
        group, _, choice = word.partition("=")
        if group == "eval":
            more_sets |= composed([word], config_dir=config_dir).tree["eval"]["sets"]
        elif group in (*ROLES, "reward"):
            chosen[group] = None if choice == "null" else composed([word], config_dir=config_dir).tree[group]
        else:
            values.append(word)

    def with_choices(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, **chosen, "eval": {**tree["eval"], "sets": {**tree["eval"]["sets"], **more_sets}}}

    # What sets need is known once they are as they will be: then it is decided who stays.
    of_sets = [word for word in values if word.lstrip("+").startswith("eval.")]
    sets = read_saved(checkpoint.config, of_sets, config_dir, change=with_choices).tree["eval"]["sets"]

    def alone(tree: dict[str, Any]) -> dict[str, Any]:
        return without_training({**tree, **chosen}, sets, str(checkpoint.path), keep=chosen)

    return load_saved(checkpoint.config, values, config_dir=config_dir, change=alone).run


def without_training(
    tree: Mapping[str, Any], sets: Mapping[str, Any], named: str, *, keep: Container[str] = ()
) -> dict[str, Any]:
    """The config of a run as that of its evaluation alone, on these sets.

    `named`: what is evaluated. `keep`: keys that stay whoever needs them, for somebody asked for them.
    """
    sets = {name: {**each} for name, each in sets.items() if isinstance(each, Mapping)}
    drawing = [each for each in sets.values() if (each.get("n") is None and not each.get("loss")) or each.get("n")]
    for each in drawing:
        if each.get("max_completion_length") is None:
            each["max_completion_length"] = tree["algorithm"].get("max_completion_length")
    by_run = any(each.get("reward") is None for each in drawing)
    needed = {"rollout": bool(drawing), "train": any(each.get("loss") for each in sets.values()), "reward": by_run}

    def stays(key: str) -> bool:
        is_role = isinstance(tree[key], Mapping) and "_target_" in tree[key]
        return key in keep or needed.get(key, not is_role or (by_run and is_scorer(key)))

    found = {key: _merged(key, node) for key, node in tree.items() if key not in FOR_RUNS and stays(key)}
    scorers = [key for key, node in found.items() if is_scorer(key) and node is not None]
    found["algorithm"] = {"_target_": TARGET, "model": named, **_scoring(tree["algorithm"], scorers)}
    found["eval"] = {"sets": sets}
    found["placement"] = _placement(tree.get("placement") or {})
    return found


def _merged(role: str, node: Any) -> Any:
    """The node of a role for a model into which the adapter is merged, and which nothing is compared with.

    A model that a run names for one of these is what it began with: the weights of a checkpoint are in its place.
    """
    if role not in ("rollout", "train") or not isinstance(node, Mapping):
        return node
    return {key: value for key, value in node.items() if key not in OF_TRAINING and "lora" not in key}


def _scoring(algorithm: Mapping[str, Any], scorers: Collection[str]) -> dict[str, Any]:
    """What the run's algorithm makes of the scores of these roles."""
    weights = algorithm.get("score_weights") or {}
    found: dict[str, Any] = {"score_weights": {role: weights[role] for role in weights if role in scorers}}
    if "prm" in scorers:
        found["prm_reward"] = algorithm.get("prm_reward")
    return found


def _placement(node: Mapping[str, Any]) -> dict[str, Any]:
    """Where roles run; who shares devices is kept where that were all, for others of them are gone."""
    if node.get("colocate_groups") == "all":
        return dict(node)
    return {key: value for key, value in node.items() if key not in OF_SHARING and not key.startswith("offload_")}


def _export(checkpoint: folder.Checkpoint, out: Path, config_dir: str | None) -> None:
    """In a process of its own, whose memory engines have afterwards."""
    words = [str(checkpoint.path), str(out), *([] if config_dir is None else ["--config-dir", config_dir])]
    done = subprocess.run(
        [sys.executable, "-m", "rolegraph.cli", "export", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-5:]
        raise CheckpointError(f"{checkpoint.path} could not be read:\n" + "\n".join(said))
