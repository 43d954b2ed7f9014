"""The main configs, fully composed: any change of a default shows up in review as a diff of these files."""

from __future__ import annotations

from pathlib import Path

CASES: dict[str, list[str]] = {
    "grpo": ["algorithm=grpo"],
    "sft": ["algorithm=sft"],
    "pt": ["algorithm=pt", "data=jsonl", "data.path=texts.jsonl"],
    "quickstart": ["experiment=quickstart"],
    "sampling": ["experiment=sampling_smollm2"],
}
FOLDER = Path(__file__).parent


def text(overrides: list[str]) -> str:
    """One composed config with all defaults, as YAML."""
    from omegaconf import OmegaConf

    from rolegraph.config.compose import as_config
    from rolegraph.config.load import composed, filled

    return OmegaConf.to_yaml(as_config(filled(composed(overrides).tree)), sort_keys=True)
