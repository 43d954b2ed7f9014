"""Samplers in a config: what must be given, where a fault is, and what a plan makes of them."""

from __future__ import annotations

import re

import pytest

from rolegraph.config import load
from rolegraph.config.schema import RunConfig
from rolegraph.errors import ConfigError
from rolegraph.placement import plan, requests
from rolegraph.placement.clusters import cluster
from roles.sampler.config import OpenAISamplerConfig, VLLMSamplerConfig
from tests.rolegraph.config.conftest import Folder

SAMPLING = """
# @package _global_
max_steps: null
algorithm:
  _target_: rolegraph.algorithms.sampling.Sampling
"""
SERVICE = ("sampler=openai", "sampler.service.base_url=http://localhost:8000/v1", "sampler.service.model=big")


@pytest.fixture
def sampling(user: Folder) -> Folder:
    user.write("algorithm/drawn.yaml", SAMPLING)
    return user


def run_of(folder: Folder, *overrides: str) -> RunConfig:
    return load(["algorithm=drawn", *overrides], config_dir=str(folder)).run


def refused(folder: Folder, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_of(folder, *overrides)
    return str(caught.value)


def test_a_service_must_be_named(sampling: Folder) -> None:
    message = refused(sampling, "sampler=openai")
    assert "sampler.service.base_url: must be given: set sampler.service.base_url=..." in message
    assert "sampler.service.model: must be given" in message
    config = run_of(sampling, *SERVICE, "sampler.service.extra_body={top_k: null}").roles["sampler"].config
    assert isinstance(config, OpenAISamplerConfig)
    assert (config.service.model, config.service.extra_body) == ("big", {"top_k": None})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sampler.service.base_url=localhost",), "sampler.service: base_url='localhost' is no address"),
        (("sampler.service.concurency=3",), "did you mean sampler.service.concurrency"),
        (("sampler.gpus=1",), "sampler: gpus=1: the model is the service's"),
        (("sampler.service.timeout_s=700",), r"sampler.service: deadline_s=600 .* timeout_s=700"),
    ],
)
def test_a_fault_of_a_service_is_shown_where_it_is(sampling: Folder, overrides: tuple[str, ...], words: str) -> None:
    message = refused(sampling, *SERVICE, *overrides)
    assert re.search(words, message), message


def test_an_engine_has_room_for_prompt_and_response(sampling: Folder) -> None:
    lengths = ("data.max_length=100", "algorithm.max_completion_length=20")
    config = run_of(sampling, "sampler=vllm", *lengths, "seed=7").roles["sampler"].config
    assert isinstance(config, VLLMSamplerConfig)
    assert (config.max_model_len, config.seed) == (120, 7)
    message = refused(sampling, "sampler=vllm", *lengths, "sampler.max_model_len=90")
    assert "sampler.max_model_len=90 is less than" in message
    assert "algorithm.temperature=3.0: vLLM samples at 2 at most" in refused(
        sampling, "sampler=vllm", "algorithm.temperature=3.0"
    )


def test_a_sampler_that_transformers_spreads_cannot_step_aside(sampling: Folder) -> None:
    spread = ("sampler=huggingface", "sampler.gpus=2", "sampler.pipeline_model_parallel_size=2")
    run_of(sampling, *spread)
    shared = ("placement=colocate", "orm=functions", "reward=exact_match", "placement.sleep_level=1")
    message = refused(sampling, *spread, *shared)
    assert "sampler.pipeline_model_parallel_size=2: a model that transformers spreads over GPUs cannot step" in message


@pytest.mark.parametrize(
    ("overrides", "actors", "devices"),
    [
        (("sampler=vllm", "sampler.gpus=4", "sampler.tensor_parallel_size=2"), 2, 2),
        (("sampler=huggingface", "sampler.gpus=4"), 4, 1),
        ((*SERVICE, "sampler.replicas=3"), 3, 0),
    ],
)
def test_where_samplers_are_placed(sampling: Folder, overrides: tuple[str, ...], actors: int, devices: int) -> None:
    run = run_of(sampling, *overrides)
    slots = plan(cluster("1x4xH100"), requests(run.roles), run.placement).roles["sampler"]
    assert len(slots) == actors
    assert {len(slot.device_ids) for slot in slots} == {devices}
