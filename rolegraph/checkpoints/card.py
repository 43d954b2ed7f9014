"""The README.md of an exported model: what it was trained from, on what and how, with the header that the hub reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolegraph.config.schema import RunConfig
    from rolegraph.models.config import ModelConfig

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""OWNER/NAME, as the hub has models and datasets."""
_SETTINGS = {
    "train": ("lr", "lr_schedule", "warmup_steps", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2"),
    "algorithm": (
        "global_batch_size",
        "num_generations",
        "max_completion_length",
        "temperature",
        "beta",
        "epsilon",
        "epsilon_high",
        "loss_type",
        "advantage_estimator",
        "lmbda",
        "num_iterations",
    ),
}
_ADAPTER = ("lora_rank", "lora_alpha", "lora_targets")
_METRICS = 24
"""Lines of metrics; those of reward, evaluation and loss come first."""


def write_card(folder: Path, run: RunConfig, *, step: int, metrics: Mapping[str, float], adapter: bool = False) -> None:
    """Write README.md into an exported folder; in the place of the one that came along from the base model."""
    text = card(run, step=step, metrics=metrics, adapter=adapter)
    (folder / "README.md").write_text(text, encoding="utf-8")


def card(run: RunConfig, *, step: int, metrics: Mapping[str, float], adapter: bool = False) -> str:
    """The text, without a path of this machine in it."""
    name = run.ray_exp_name or run.algorithm.name.lower()
    base, data = _base(run), _data(run)
    parts = [
        "---\n" + _header(run, adapter) + "---\n",
        f"# {name}, step {step}\n",
        f"{_what(run, adapter)} of {base}, trained with {_method(run)} on {data} by rolegraph {version('rolegraph')}. "
        f"It took {step} optimizer steps{_warm_start(run, step)}.\n",
        _use(adapter),
        "## How it was trained\n\n" + _table(("setting", "value"), _settings(run)),
    ]
    if shown := _shown(metrics):
        parts.append("## Last metrics\n\n" + _table(("metric", "value"), shown))
    return "\n".join(parts)


def base_name(run: RunConfig) -> str | None:
    """The base model's name on the hub; null where it is a folder, or was made."""
    return _on_hub(_base_model(run).path)


def _base_model(run: RunConfig) -> ModelConfig:
    from rolegraph.config.model_rules import model_of

    return model_of(run, "train")


def _header(run: RunConfig, adapter: bool) -> str:
    lines: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    if (base := base_name(run)) is not None:
        lines |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if (data := _dataset_name(run)) is not None:
        lines["datasets"] = [data]
    lines["tags"] = ["rolegraph", _method(run).lower(), *(["lora"] if _tuned(run) else [])]
    # JSON is YAML, and quotes what has to be quoted.
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in lines.items())


def _method(run: RunConfig) -> str:
    return run.algorithm.name


def _warm_start(run: RunConfig, step: int) -> str:
    """How many of the steps were supervised ones before the method's own."""
    before = getattr(run.algorithm.config, "warm_start", None)
    if before is None:
        return ""
    rate = "" if before.lr is None else f" at a learning rate of {before.lr:g}"
    return f", of which {min(before.max_steps, step)} were a supervised warm start{rate}"


def _what(run: RunConfig, adapter: bool) -> str:
    if adapter:
        return "A low-rank adapter"
    return "A low-rank fine-tune, merged into the weights," if _tuned(run) else "A fine-tune"


def _tuned(run: RunConfig) -> bool:
    return getattr(run.roles["train"].config, "tuner_type", "full") != "full"


def _base(run: RunConfig) -> str:
    model = _base_model(run)
    if model.maker is not None:
        args = ", ".join(f"{key}={value}" for key, value in model.args.items())
        return f"the model that `{model.maker}({args})` makes"
    return f"`{_short(model.path)}`"


def _data(run: RunConfig) -> str:
    data = run.data
    if data.task is not None:
        return f"{data.size} rows of reasoning-gym's `{data.task}`"
    paths = [data.path] if isinstance(data.path, str | None) else list(data.path)
    return ", ".join(f"`{_short(path)}`" for path in paths)


def _dataset_name(run: RunConfig) -> str | None:
    return _on_hub(run.data.path) if run.data.source == "huggingface" else None


def _on_hub(name: Any) -> str | None:
    found = isinstance(name, str) and _HUB_NAME.fullmatch(name) and not Path(name).exists()
    return name if found else None


def _short(path: str | None) -> str:
    """A name on the hub, or the last part of a path: the rest is this machine's."""
    return str(path) if _on_hub(path) else Path(str(path)).name


def _use(adapter: bool) -> str:
    if adapter:
        code = "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
    else:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            "model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)"
        )
    return f"```python\n{code}\n```\n"


def _settings(run: RunConfig) -> dict[str, Any]:
    train = run.roles["train"].config
    nodes = {"train": train, "algorithm": run.algorithm.config}
    names = {**_SETTINGS, "train": (*_SETTINGS["train"], *(_ADAPTER if _tuned(run) else ()))}
    found = {
        f"{node}.{name}": getattr(nodes[node], name)
        for node in nodes
        for name in names[node]
        if _has(nodes, node, name)
    }
    return {"seed": run.seed, **found}


def _has(nodes: Mapping[str, Any], node: str, name: str) -> bool:
    return getattr(nodes[node], name, None) is not None


def _shown(metrics: Mapping[str, float]) -> dict[str, str]:
    first = ("eval/", "reward/", "loss", "kl", "entropy", "grad_norm")
    kept = [name for name in metrics if not name.startswith(("seconds", "tokens_per", "bytes"))]
    kept.sort(key=lambda name: next((i for i, each in enumerate(first) if name.startswith(each)), len(first)))
    return {name: f"{metrics[name]:.4g}" for name in kept[:_METRICS]}


def _table(head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
