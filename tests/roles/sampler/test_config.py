"""The samplers' settings: each rule, what a plan makes of them, and the models they read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rolegraph.placement import requests
from rolegraph.placement.types import RoleRequest
from rolegraph.services.config import ServiceConfig
from roles.sampler.config import HuggingFaceSamplerConfig, OpenAISamplerConfig, VLLMSamplerConfig

SERVICE = ServiceConfig(base_url="http://host/v1", model="m")


class Spec:
    def __init__(self, config: Any) -> None:
        self.config = config


def request_of(config: Any) -> RoleRequest:
    [request] = requests({"sampler": Spec(config)})
    return request


def test_the_defaults_have_no_fault() -> None:
    assert VLLMSamplerConfig().problems() == []
    assert list(HuggingFaceSamplerConfig().problems()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel_size": 2}, ["sampler.data_parallel_size=2", "sampler.replicas=2"]),
        ({"engine_kwargs": {"seed": 1}}, ["sampler.engine_kwargs.seed", "set `seed` of the role"]),
        ({"engine_kwargs": {"weight_transfer_config": {}}}, ["weight_transfer_config", "never change"]),
    ],
)
def test_rules_of_the_engine_name_the_sampler(settings: dict[str, Any], words: list[str]) -> None:
    [problem] = VLLMSamplerConfig(**settings).problems()
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, "sampler.max_num_seqs=0 must be at least 1"),
        ({"pipeline_model_parallel_size": 0}, "sampler.pipeline_model_parallel_size=0"),
    ],
)
def test_rules_of_the_transformers_sampler(settings: dict[str, Any], words: str) -> None:
    [problem] = HuggingFaceSamplerConfig(**settings).problems()
    assert words in problem


def test_logprobs_are_those_of_the_draws_and_prefixes_are_kept() -> None:
    values = VLLMSamplerConfig(seed=5, enable_prefix_caching=False).engine_values()
    assert values == {"enable_prefix_caching": False, "logprobs_mode": "processed_logprobs", "seed": 5}
    assert not VLLMSamplerConfig.reloads_weights


def test_what_a_plan_makes_of_them() -> None:
    engine = request_of(VLLMSamplerConfig(replicas=2, gpus=4, tensor_parallel_size=2))
    assert (engine.count, engine.gpus, engine.tensor, engine.light) == (2, 4, 2, False)
    model = request_of(HuggingFaceSamplerConfig(gpus=2, pipeline_model_parallel_size=2))
    assert (model.gpus, model.pipeline, model.is_spmd) == (2, 2, False)
    service = request_of(OpenAISamplerConfig(service=SERVICE, replicas=3))
    assert (service.count, service.gpus, service.light, service.is_spmd) == (3, 0, True, False)


def test_a_service_takes_text_and_an_engine_tokens() -> None:
    assert OpenAISamplerConfig.takes_text
    for config in (VLLMSamplerConfig, HuggingFaceSamplerConfig):
        assert not getattr(config, "takes_text", False)


@pytest.mark.parametrize("module", ["vllm", "openai", "config"])
def test_a_sampler_and_its_settings_import_no_engine(module: str) -> None:
    engines = "{'torch', 'ray', 'vllm', 'transformers', 'openai'}"
    code = f"import sys, roles.sampler.{module}; print(sorted({engines} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
