"""The engine's end of a weight sync: runs in vLLM's workers, one process a tensor-parallel rank.

vLLM loads this module in each worker as its worker extension, which registers `StreamEngine` with vLLM's own
weight-transfer factory. Every worker receives whole tensors; vLLM cuts out its shard while loading.

The extension's methods return a fault as text instead of raising: of several workers that raise, vLLM reads the answer
of the first alone, and would take the other answers for those of the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rolegraph.errors import WeightSyncError
from rolegraph.interfaces import AdapterInfo, TensorInfo, TransferGroup
from rolegraph.weights import WeightReceiver
from roles.rollout import (
    adapters,
    kernels,  # noqa: F401 - registers its operators in every worker
)

BACKEND = "rolegraph"


@dataclass
class StreamInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The group to join, and the rank of this replica's first worker in it."""

    group: TransferGroup
    first_rank: int


@dataclass
class StreamUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Everything the trainer announced."""

    manifest: list[TensorInfo]


class StreamEngine(WeightTransferEngine[StreamInit, StreamUpdate]):  # type: ignore[misc]
    """Receives the frames of `rolegraph.wire` over gloo, NCCL or CUDA IPC and loads them layer by layer."""

    init_info_cls = StreamInit
    update_info_cls = StreamUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver: WeightReceiver | None = None
        self.loaded = 0
        """Tensors that have reached the model in the current update."""

    def init_transfer_engine(self, init_info: StreamInit) -> None:
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        self.receiver = WeightReceiver(init_info.group, rank, device=self.device.type)

    def start_weight_update(self) -> None:
        self.loaded = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class also synchronises through torch.accelerator, which a machine without one does not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: StreamUpdate) -> None:
        if self.receiver is None:
            raise WeightSyncError("this engine is not connected to a trainer")
        current = "no weight yet"

        def arriving(receiver: WeightReceiver) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal current
            for name, tensor in receiver.receive(update_info.manifest):
                current = f"{name} {list(tensor.shape)}"
                yield name, tensor
                self.loaded += 1

        try:
            stream = arriving(self.receiver)
            self.model.load_weights(stream)
            for name, _ in stream:
                raise WeightSyncError(f"the model has no use for {name}")
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"the engine could not load {current}: {type(error).__name__}: {error}") from error

    def receive_tensors(self, manifest: list[TensorInfo]) -> dict[str, torch.Tensor]:
        """Everything the trainer sends, in host memory."""
        if self.receiver is None:
            raise WeightSyncError("this engine is not connected to a trainer")
        return {name: tensor.detach().cpu().clone() for name, tensor in self.receiver.receive(manifest)}

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """Bring a tied head's packed copy up to date.

        On a CPU vLLM multiplies by a packed copy of each weight, made when the layer is loaded. A tied head is never
        loaded: it has the embedding's new weight and, without this, a copy of the old one.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and not layer.weight.is_meta:
                layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Give the layers that were not completed their old weights back, and leave the group."""
        from vllm.model_executor.model_loader.reload import layerwise

        self.shutdown()
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, StreamEngine)


class WorkerExtension:
    """Mixed into vLLM's worker; each method answers None, or the fault as text."""

    weight_transfer_engine: WeightTransferEngine
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    shutdown_weight_transfer_engine: Callable[[], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    model_runner: Any

    def stream_connect(self, group: TransferGroup, first_rank: int) -> str | None:
        """Join `group`."""
        return _fault(lambda: self.init_weight_transfer_engine({"group": group, "first_rank": first_rank}))

    def stream_receive(self, manifest: list[TensorInfo]) -> tuple[str | None, bool]:
        """Load what the trainer sends; also says whether the model is whole (all new or all old)."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, StreamEngine)

        def receive() -> None:
            self.start_weight_update()
            self.update_weights({"manifest": manifest})
            self.finish_weight_update()

        fault = _fault(receive)
        if fault is None:
            return None, True
        again = _fault(engine.abandon)
        self._weight_update_active = False
        return fault, engine.loaded == 0 and again is None

    def adapter_start(self) -> str | None:
        """Make the place that `adapter_receive` fills."""
        return _fault(lambda: adapters.place_empty(self.model_runner))

    def adapter_receive(self, manifest: list[TensorInfo], info: AdapterInfo) -> tuple[str | None, bool]:
        """Load the adapter the trainer sends; also says whether the model is whole (with the new one, or the old)."""
        engine = self.weight_transfer_engine
        assert isinstance(engine, StreamEngine)
        torn = False

        def receive() -> None:
            nonlocal torn
            tensors = engine.receive_tensors(manifest)
            torn = True
            adapters.replace(self.model_runner, tensors, info)
            torn = False

        fault = _fault(receive)
        if fault is not None:
            engine.shutdown()
        return fault, not torn

    def stream_disconnect(self) -> str | None:
        """Leave the group."""
        return _fault(self.shutdown_weight_transfer_engine)


def _fault(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:
        return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
    return None
