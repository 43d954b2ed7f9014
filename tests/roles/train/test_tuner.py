"""What a config says about adapters."""

from __future__ import annotations

from typing import Any

import pytest

from rolegraph.values import AdapterInfo
from roles.train.config import MegatronTrainConfig
from roles.train.tuner import LINEAR_MODULES


def test_all_weights_are_trained_unless_asked_otherwise() -> None:
    assert MegatronTrainConfig().adapter is None
    assert MegatronTrainConfig().problems() == []


def test_an_adapter_has_the_modules_in_the_order_of_the_layer() -> None:
    config = MegatronTrainConfig(tuner_type="lora", lora_rank=4, lora_alpha=8, lora_targets=["v_proj", "q_proj"])
    assert config.problems() == []
    assert config.adapter == AdapterInfo(4, 8, ("q_proj", "v_proj"))
    everything = MegatronTrainConfig(tuner_type="lora").adapter
    assert everything is not None
    assert everything.targets == LINEAR_MODULES


def test_targets_of_a_backend_that_looks_at_the_model_stay_as_asked() -> None:
    class Open(MegatronTrainConfig):
        lora_modules = None

    config = Open(tuner_type="lora", lora_targets=["c_attn"])
    assert config.problems() == []
    assert config.adapter is not None
    assert config.adapter.targets == ("c_attn",)
    everything = Open(tuner_type="lora").adapter
    assert everything is not None
    assert everything.targets == ("all-linear",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 8}, "train.lora_rank has no effect with train.tuner_type=full: set train.tuner_type=lora"),
        ({"lora_targets": ["q_proj"]}, "train.lora_targets has no effect"),
        ({"tuner_type": "lora", "lora_rank": 0}, "train.lora_rank=0 must be 1 or more"),
        ({"tuner_type": "lora", "lora_alpha": -1.0}, "train.lora_alpha=-1 must be above 0"),
        ({"tuner_type": "lora", "lora_targets": []}, "leaves nothing to train"),
        ({"tuner_type": "lora", "lora_targets": ["q_prj"]}, "did you mean q_proj?"),
        ({"tuner_type": "lora", "lora_targets": ["mlp.up"]}, "did you mean up_proj?"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    (problem,) = MegatronTrainConfig(**settings).problems()
    assert message in problem
