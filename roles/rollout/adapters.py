"""The policy's adapter in vLLM's workers: one, which every request uses and each weight sync replaces in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import AdapterInfo

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest

_ID = 1


def request() -> LoRARequest:
    """What a request carries to be answered with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _ID, "it comes from the trainer")  # vLLM wants a path, and reads none


def place_empty(runner: Any) -> None:
    """An adapter that adds nothing, so that samples which begin before the first sync go on with what it brings."""
    runner.lora_manager.add_dummy_lora(request(), rank=1)  # of zeros
    runner.lora_manager._adapter_manager.activate_adapter(_ID)


def replace(runner: Any, tensors: dict[str, Tensor], info: AdapterInfo) -> None:
    """Put the adapter made of these tensors, by PEFT's names, in the place of the one before.

    Raises WeightSyncError, and leaves that one where it is, for modules that this model has no place for.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = runner.lora_manager._adapter_manager
    helper = PEFTHelper(r=info.rank, lora_alpha=info.alpha, target_modules=list(info.targets))  # type: ignore[arg-type]
    helper.validate_legal(manager.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    # vLLM scales B in place.
    adapter = LoRAModel.from_lora_tensors(
        _ID,
        {name: tensor.clone() for name, tensor in tensors.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    known = {*manager.modules, *(name for packed in manager.packed_modules.values() for name in packed)}
    if strange := sorted(adapter.loras.keys() - known):
        raise WeightSyncError(f"the engine has no place for an adapter of {', '.join(strange[:5])}")
    manager.remove_adapter(_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(_ID)
