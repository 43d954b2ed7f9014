"""The README.md of an exported model: what the hub reads of it, and what a person does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolegraph.checkpoints.card import card, write_card
from rolegraph.config import load

HUB = ["model=hf", "model.path=Qwen/Qwen3-0.6B", "data=huggingface", "data.path=openai/gsm8k", "data.name=main"]


def header(text: str) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)---\n", text, flags=re.DOTALL)
    assert found
    read: dict[str, Any] = yaml.safe_load(found[1])
    return read


def test_models_and_data_of_the_hub_are_in_the_header() -> None:
    run = load(["algorithm=sft", *HUB, "train.lr=3e-05"]).run
    text = card(run, step=40, metrics={"loss": 0.12345, "seconds/train": 3.0})
    assert header(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "finetune",
        "datasets": ["openai/gsm8k"],
        "tags": ["rolegraph", "sft"],
    }
    assert "40 optimizer steps" in text
    assert "| train.lr | 3e-05 |" in text
    assert "| loss | 0.1235 |" in text
    assert "seconds/train" not in text


def test_an_adapter_is_one_of_its_base() -> None:
    run = load(["algorithm=sft", *HUB, "train.tuner_type=lora"]).run
    alone, merged = (card(run, step=1, metrics={}, adapter=adapter) for adapter in (True, False))
    assert header(alone)["library_name"] == "peft"
    assert header(alone)["base_model_relation"] == "adapter"
    assert "AutoPeftModelForCausalLM" in alone
    assert header(merged)["tags"] == ["rolegraph", "sft", "lora"]
    assert "| train.lora_rank | 16 |" in merged


def test_the_base_is_what_was_trained() -> None:
    run = load(["algorithm=sft", *HUB, "train.model=Qwen/Qwen3-1.7B"]).run
    text = card(run, step=1, metrics={})
    assert header(text)["base_model"] == "Qwen/Qwen3-1.7B"
    assert "`Qwen/Qwen3-1.7B`" in text
    assert "0.6B" not in text


@pytest.mark.parametrize("path", ["/data/secret/base-7b", "./models/base-7b", "~/models/base-7b"])
def test_folders_of_this_machine_are_named_by_their_last_part(path: str, tmp_path: Path) -> None:
    run = load(["algorithm=sft", "model=hf", f"model.path={path}", "data=jsonl", f"data.path={tmp_path}/a.jsonl"]).run
    write_card(tmp_path, run, step=3, metrics={})
    text = (tmp_path / "README.md").read_text()
    assert "`base-7b`" in text
    assert "`a.jsonl`" in text
    assert "base_model" not in header(text)
    assert not re.search(r"[~.]?/(data|models)|" + re.escape(str(tmp_path)), text)


def test_a_made_model_and_a_task_are_named_by_what_makes_them() -> None:
    text = card(load(["experiment=quickstart"]).run, step=3, metrics={"reward/mean": 0.5, "a": 1.0})
    assert "the model that `rolegraph.models.tiny.make(" in text
    assert "reasoning-gym's `chain_sum`" in text
    assert text.index("reward/mean") < text.index("| a |")
    assert header(text)["tags"] == ["rolegraph", "grpo"]


def test_the_steps_of_a_warm_start_are_told_apart() -> None:
    run = load(["experiment=quickstart"]).run
    assert "30 optimizer steps, of which 28 were a supervised warm start at a learning rate of 0.001." in card(
        run, step=30, metrics={}
    )
    assert "5 optimizer steps, of which 5 were" in card(run, step=5, metrics={})
    assert "warm start" not in card(load(["algorithm=grpo"]).run, step=30, metrics={})
