"""Teachers in a config: where they are put, how long what they read is, and what an engine cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolegraph.config import load
from rolegraph.config.rules import settle
from rolegraph.config.schema import RunConfig
from rolegraph.errors import ConfigError
from rolegraph.models.config import ModelConfig
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from roles.teacher.config import HuggingFaceTeacherConfig, VLLMTeacherConfig
from tests.rolegraph.config.conftest import Folder

GKD = ("algorithm=gkd", "train=megatron", "rollout=vllm", "placement=separate", "algorithm.gkd_logits_topk=8")
LENGTHS = ("data.max_length=100", "algorithm.max_completion_length=20")
SHORT = ("algorithm.lmbda=0", "rollout=null")
KEYED = "data.preprocessors=[mine.with_teacher_key]"
"""Questions that are made say nothing of teachers by themselves."""


def run_of(*overrides: str, folder: Folder | None = None) -> RunConfig:
    return load([*GKD, *overrides], config_dir=None if folder is None else str(folder)).run


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_of(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_group_is_chosen_for_another_place_with_and_without_plus(plus: str, user: Folder) -> None:
    run = run_of("teacher=huggingface", f"{plus}model@teacher.model=tiny", "teacher.model.args.seed=5")
    model = run.roles["teacher"].config.model
    assert isinstance(model, ModelConfig)
    assert (model.maker, model.args["seed"]) == ("rolegraph.models.tiny.make", 5)
    text = "# @package _global_\ndefaults:\n  - /model@teacher.model: smollm2_135m\n"
    user.write("experiment/taught.yaml", text)
    known = run_of("teacher=huggingface", "experiment=taught", folder=user).roles["teacher"].config.model
    assert known.maker != model.maker
    changed = run_of("teacher=huggingface", "experiment=taught", f"{plus}model@teacher.model=tiny", folder=user)
    assert changed.roles["teacher"].config.model.maker == model.maker, "one that a file makes already"
    gone = run_of("teacher=huggingface", "experiment=taught", "model@teacher.model=null", folder=user)
    assert gone.roles["teacher"].config.model is None


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_second_teacher(plus: str) -> None:
    run = run_of(
        "teacher=vllm", f"{plus}teacher@teacher_math=huggingface", "teacher_math.model=/somewhere", *LENGTHS, KEYED
    )
    assert isinstance(run.roles["teacher"].config, VLLMTeacherConfig)
    assert isinstance(run.roles["teacher_math"].config, HuggingFaceTeacherConfig)
    assert run.roles["teacher_math"].config.model == "/somewhere"


def test_rows_that_are_made_have_to_name_one_of_several_teachers() -> None:
    two = ("teacher=huggingface", "+teacher@teacher_math=huggingface")
    expected = (
        "2 teachers take part (teacher, teacher_math), and rows of data.source=reasoning_gym have no column "
        "teacher_key that says which one a row has: add it by data.preprocessors, or keep one teacher"
    )
    assert expected in " ".join(refused(*two).split())
    run_of(*two, KEYED)
    run_of(*two, "+data.columns.teacher_key=source")
    run_of(*two, "data=jsonl", "data.path=rows.jsonl")  # what a file says is known once it is read


def test_an_unknown_choice_at_another_place_is_named() -> None:
    assert "nothing_of_that_name" in refused("teacher=huggingface", "model@teacher.model=nothing_of_that_name")


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ((), 121),
        (("algorithm.lmbda=0.5",), 121),
        (("algorithm.lmbda=0.5", "algorithm.max_completion_length=1"), 102),
        (("data.max_teacher_prompt_length=150",), 171),
        (("data.max_teacher_prompt_length=50",), 121),
        (("algorithm.lmbda=0.5", "data.max_teacher_prompt_length=50"), 151),
        (SHORT, 101),
        ((*SHORT, "data.max_teacher_prompt_length=150"), 251),
    ],
)
def test_an_engine_that_teaches_has_room_for_the_longest_row_and_a_token(
    overrides: tuple[str, ...], tokens: int
) -> None:
    rows = ("teacher=vllm", *LENGTHS, *overrides)
    assert run_of(*rows).roles["teacher"].config.max_model_len == tokens
    assert run_of(*rows, f"teacher.max_model_len={tokens}").roles["teacher"].config.max_model_len == tokens
    message = refused(*rows, f"teacher.max_model_len={tokens - 1}")
    assert f"teacher.max_model_len={tokens - 1} is less than data.max_" in message
    assert f"+ 1 (the engine draws a token to score): set it to {tokens}, or to null" in message


def test_the_rollout_needs_no_room_for_what_teachers_read() -> None:
    run = run_of("teacher=vllm", *LENGTHS, "data.max_teacher_prompt_length=150")
    assert run.roles["rollout"].config.max_model_len == 120
    more = run_of("teacher=huggingface", "+teacher@teacher_math=vllm", *LENGTHS, KEYED)
    assert more.roles["teacher_math"].config.max_model_len == 121


def test_positions_of_a_teacher(tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 120}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    model = ("teacher=vllm", f"teacher.model={tmp_path}", *LENGTHS)
    message = refused(*model)
    assert "data.max_length=100 + algorithm.max_completion_length=20 + 1 (the engine draws a token to score)" in message
    assert f"= 121 tokens are more than the 120 positions of {tmp_path}" in message
    run_of(*model, "algorithm.max_completion_length=19")
    run_of("teacher=megatron", *model[1:])
    short = refused(*model, *SHORT, "data.max_length=120")
    assert "lower it to 119" in short


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("teacher.max_logprobs=7",),
            "gkd_logits_topk=8 is more than teacher.max_logprobs=7: lower it, or set teacher",
        ),
        (
            ("+teacher@teacher_math=vllm", "teacher_math.max_logprobs=7", KEYED),
            "algorithm.gkd_logits_topk=8 is more than teacher_math.max_logprobs=7",
        ),
        (("teacher.max_logprobs=0",), "teacher.max_logprobs=0 must be at least 1, or null"),
        (("teacher.tensor_parallel_size=0",), "teacher.tensor_parallel_size=0 must be at least 1"),
        (("teacher.engine_kwargs.max_logprobs=9",), "teacher.engine_kwargs.max_logprobs: set `max_logprobs`"),
        (("teacher.engine_kwargs.seed=9",), "teacher.engine_kwargs.seed: a teacher draws nothing"),
        (("teacher.enable_prefix_caching=true",), "teacher.enable_prefix_caching"),
        (
            ("placement=colocate", "placement.offload_teacher_model=true", "teacher.enable_sleep_mode=false"),
            "teacher.enable_sleep_mode=false contradicts placement.offload_teacher_model=true",
        ),
        (("use_ray=false",), "use_ray=false puts all roles in one process"),
        (("algorithm.gkd_logits_topk=null",), "algorithm.gkd_logits_topk=null compares the whole vocabulary"),
        (("algorithm.topk_mode=tail", "algorithm.temperature=0.7"), "algorithm.topk_mode=tail at temperature=0.7"),
    ],
)
def test_what_an_engine_that_teaches_refuses(overrides: tuple[str, ...], words: str) -> None:
    assert words in refused("teacher=vllm", *overrides)


@pytest.mark.parametrize(
    ("overrides", "sleeps"),
    [
        (("placement=colocate", "placement.offload_teacher_model=true"), True),
        (("placement=colocate", "placement.offload_teacher_model=false"), False),
        (("placement=separate",), False),
    ],
)
def test_an_engine_that_steps_aside_is_started_for_it(overrides: tuple[str, ...], sleeps: bool) -> None:
    run = run_of("teacher=vllm", *overrides)
    run = settle(run, plan(cluster("1x3xH100-80G"), requests(run.started), run.placement))
    assert run.roles["teacher"].config.enable_sleep_mode is sleeps


@pytest.mark.parametrize(
    ("limit", "told"),
    [(None, -1), (8, 8)],
)
def test_the_limit_on_tokens_a_position_reaches_the_engine(limit: int | None, told: Any) -> None:
    values = VLLMTeacherConfig(max_logprobs=limit, max_num_seqs=3000).engine_values()
    assert (values["max_logprobs"], values["max_num_batched_tokens"]) == (told, 3000)
    run_of("teacher=vllm", f"teacher.max_logprobs={'null' if limit is None else limit}")
