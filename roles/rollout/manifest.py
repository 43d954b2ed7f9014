"""Whether the weights that a trainer announces are those of the model that an engine runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import AdapterInfo, TensorInfo


def incomplete(fault: str) -> WeightSyncError:
    """What samples end with that no sync makes whole weights for, after one that broke off by `fault`."""
    return WeightSyncError(f"the engine's weights are incomplete until the next sync: {fault}")


def check_manifest(
    manifest: Sequence[TensorInfo], weights: Mapping[str, tuple[int, ...]], *, optional: Collection[str] = ()
) -> None:
    """Compare with the names and shapes of the engine's `weights`, `optional` ones (of tied heads) aside.

    Raises WeightSyncError naming what is missing, unknown or misshapen.
    """
    announced = {info.name: tuple(info.shape) for info in manifest if info.name not in optional}
    expected = {
        name: tuple(shape)
        for name, shape in weights.items()
        if name not in optional and not name.endswith("rotary_emb.inv_freq")
    }
    wrong = [f"missing {name}" for name in expected if name not in announced]
    wrong += [f"unknown {name}" for name in announced if name not in expected]
    wrong += [
        f"{name} has shape {list(announced[name])}, the model wants {list(shape)}"
        for name, shape in expected.items()
        if name in announced and announced[name] != shape
    ]
    _complain(wrong)


def check_adapter(manifest: Sequence[TensorInfo], weights: Mapping[str, tuple[int, ...]], adapter: AdapterInfo) -> None:
    """Compare matrices of an adapter, by PEFT's names, with the `weights` they belong to.

    Raises WeightSyncError naming what is unknown or misshapen.
    """
    wrong = []
    for info in manifest:
        module, _, side = info.name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        weight, shape = weights.get(f"{module}.weight"), tuple(info.shape)
        if weight is None or side not in ("A", "B"):
            wrong.append(f"unknown {info.name}")
            continue
        wanted = (adapter.rank, weight[1]) if side == "A" else (weight[0], adapter.rank)
        if shape != wanted:
            wrong.append(f"{info.name} has shape {list(shape)}, the model wants {list(wanted)}")
    _complain(wrong)


def _complain(wrong: Sequence[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise WeightSyncError(f"the trainer's weights are not those of the model: {'; '.join(wrong[:5])}{more}")
