"""The weights of a model of transformers under its checkpoint's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from roles.checkpoint_names import UnnamedWeightError, _rows_of, checkpoint_views, need_not_come  # noqa: E402
from tests.models import make_checkpoint  # noqa: E402
from tests.roles.rollout.replica import checkpoint_tensors  # noqa: E402

pytestmark = pytest.mark.engine


def loaded(folder: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral"])
def test_they_are_the_models_own_memory(tmp_path: Path, kind: str) -> None:
    if kind == "mixtral":  # whose experts have other names in the checkpoint, in modules of another name
        import transformers

        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 99}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).save_pretrained(tmp_path)
    else:
        make_checkpoint(tmp_path, kind)
    model, saved = loaded(tmp_path), checkpoint_tensors(tmp_path)
    views = checkpoint_views(model)
    assert views.keys() == saved.keys()
    assert all(torch.equal(views[name], saved[name]) for name in saved)
    for view in views.values():
        view.zero_()
    assert not any(weight.count_nonzero() for weight in model.parameters())


def test_tied_weights_have_both_their_names_and_buffers_need_not_come(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tied=True)
    model = loaded(tmp_path)
    views = checkpoint_views(model)
    assert need_not_come(model, views) == {"lm_head.weight"}
    assert views.keys() - checkpoint_tensors(tmp_path).keys() == {"lm_head.weight"}
    model.register_buffer("counts", torch.zeros(3))
    assert need_not_come(model, checkpoint_views(model)) == {"lm_head.weight", "counts"}


def test_a_weight_that_loading_turns_round_is_named() -> None:
    weight = torch.zeros(2, 3, 4)
    rows = torch.arange(6).reshape(2, 3, 1)
    assert set(_rows_of("experts", weight, {"a": rows[0], "b": rows[1]})) == {"a", "b"}
    for turned in ({"experts": rows.transpose(1, 2)}, {"a": rows[:, 0], "b": rows[:, 1]}):
        with pytest.raises(UnnamedWeightError, match="experts is not as the checkpoint has it"):
            _rows_of("experts", weight, turned)
