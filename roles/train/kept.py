"""Sets of weights that a policy keeps beside those under training."""

from __future__ import annotations

from torch import Tensor

from rolegraph.errors import RoleGraphError
from rolegraph.interfaces import PolicyWeights


def kept_weights(
    weights: PolicyWeights, reference: dict[str, Tensor] | None, average: dict[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """The set of this name, by parameter name; null for the weights of now.

    Raises RoleGraphError, with what to do, where that set is not kept.
    """
    if weights == "current":
        return None
    kept = reference if weights == "initial" else average
    if kept is None:
        raise RoleGraphError(
            "no reference weights are kept: set train.reference=initial, or call save_reference() first"
            if weights == "initial"
            else "no average of the weights is kept: call average_weights() first"
        )
    return kept
