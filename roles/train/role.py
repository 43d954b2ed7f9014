"""What train roles do alike, whatever computes: endpoints over a policy, a trainer, an export and an account of
memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from rolegraph.batch import Batch
from rolegraph.interfaces import (
    AdapterInfo,
    HeadInfo,
    LossSpec,
    Metrics,
    PolicyWeights,
    TensorInfo,
    TrainRole,
    TransferGroup,
    first_rank,
)
from rolegraph.role import endpoint
from roles.train.options import TrainConfig

if TYPE_CHECKING:
    from rolegraph.losses.types import Loss
    from rolegraph.wire import WeightSender
    from roles.train.adapter import AdapterExport
    from roles.train.hf_folder import Export
    from roles.train.trainer import Trainer


class KeptWeights(Protocol):
    """A policy's sets of weights."""

    def save_reference(self) -> None:
        """Copy the weights of now."""

    def update_average(self, decay: float) -> None:
        """average = decay * average + (1 - decay) * weights; the first call begins with the weights of now."""

    def holding(self, weights: PolicyWeights) -> AbstractContextManager[None]:
        """Inside, the model computes with another of its sets of weights; RoleGraphError where it is not kept."""


class Memory(Protocol):
    """What of a policy is on its device."""

    def need(self, *parts: str) -> None:
        """TurnError unless these parts (model, optimizer, gradients) are on the device."""

    def give(self, *, model: bool, optimizer: bool) -> object:
        """Free these parts, and the gradients with either."""

    def take(self, *, model: bool, optimizer: bool) -> None:
        """Bring these parts back."""


class Checkpoints(Protocol):
    """Saves and loads a policy and its trainer; all ranks call each of these, but for `is_writing`."""

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes; may be asked from any thread."""

    def save(self, folder: Path) -> None:
        """See `TrainRole.save`."""

    def finish(self) -> None:
        """See `TrainRole.finish_save`."""

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """See `TrainRole.load`."""


class ShardedTrain(TrainRole):
    """One rank of a policy whose parts, or whose work, ranks share; `setup` of a backend makes what it works with.

    Every endpoint but `rendezvous` and `weight_manifest` is collective: all ranks have to be called.
    """

    environment: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            # glibc would unmap large blocks when freed, and page them in again for the next micro-batch, which costs
            # more than the arithmetic on them; and it would give this thread an arena that holds no large blocks.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        }
    )
    config: TrainConfig
    _policy: KeptWeights
    _trainer: Trainer
    _export: Export
    _adapters: AdapterExport | None = None
    """Where adapters are trained, these alone."""
    _offload: Memory
    _checkpoint: Checkpoints
    _loss: tuple[LossSpec, Loss] | None = None
    _sender: WeightSender | None = None

    def teardown(self) -> None:
        """Leave all process groups, and give back the memory that waits for the next micro-batch."""
        from rolegraph.losses.projection import release_buffers

        ShardedTrain.disconnect_weights(self)
        self._leave()
        release_buffers()

    def _leave(self) -> None:
        """Leave the backend's process groups."""
        raise NotImplementedError

    def _write_folder(self, path: str) -> None:
        """Write a Hugging Face folder, from all ranks together."""
        raise NotImplementedError

    @endpoint(dispatch="dp", collect=first_rank, cost="length")
    def step(self, batch: Batch, *, loss: LossSpec, temperature: float = 1.0, lr: float | None = None) -> Metrics:
        """Take one optimizer step on the global batch, of which `batch` is this data-parallel rank's part."""
        self._offload.need("model", "optimizer", "gradients")
        return self._trainer.step(batch, self._resolve(loss), temperature=temperature, lr=lr)

    @endpoint(dispatch="dp", cost="length")
    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, reference: bool = False, entropy: bool = False
    ) -> Batch:
        """Score the responses. Returns the new columns alone, for `Batch.merge`.

        They are `logprobs` (and `entropy`, nats, where asked), or with `reference` `ref_logprobs` and, where the batch
        has `logprobs`, the row's `ref_kl`: the sum over trained tokens of logprobs - ref_logprobs.
        """
        self._offload.need("model")
        if not reference:
            return Batch.from_columns(self._trainer.logprobs(batch, temperature=temperature, entropy=entropy))
        from roles.train.trainer import row_divergence

        with self._policy.holding("initial"):
            columns = self._trainer.logprobs(batch, temperature=temperature, entropy=False)
        scored = {"ref_logprobs": columns["logprobs"]}
        if "logprobs" in batch.column_names:
            scored["ref_kl"] = row_divergence(batch, columns["logprobs"])
        return Batch.from_columns(scored)

    @endpoint()
    def reset_optimizer(self) -> None:
        """Forget moments, and start the learning-rate schedule over."""
        self._offload.need("optimizer")
        self._trainer.reset()

    @endpoint()
    def save_reference(self) -> None:
        """Make the weights of now the reference weights."""
        self._offload.need("model")
        self._policy.save_reference()

    @endpoint(dispatch="dp", cost="length")
    def teach(
        self, batch: Batch, *, weights: PolicyWeights, topk: int = 0, hidden: bool = False, temperature: float = 1.0
    ) -> Batch:
        """See `TrainRole.teach`."""
        self._offload.need("model")
        with self._policy.holding(weights):
            return self._trainer.teach(batch, topk=topk, hidden=hidden, temperature=temperature)

    @endpoint()
    def average_weights(self, decay: float) -> None:
        """See `TrainRole.average_weights`."""
        self._offload.need("model")
        self._policy.update_average(decay)

    @endpoint()
    def use_teacher_head(self, head: Batch | PolicyWeights, info: HeadInfo | None = None) -> None:
        """See `TrainRole.use_teacher_head`."""
        self._offload.need("model")
        self._trainer.use_teacher_head(head, info)

    @endpoint()
    def export_hf(self, path: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face folder that loads like the one the policy came from, or PEFT's of the adapter alone."""
        self._offload.need("model")
        if not adapter:
            self._write_folder(path)
            return
        from roles.train.adapter import write_adapter

        write_adapter(self._adapters_alone(), path, base=self.config.folder)

    @endpoint()
    def save(self, path: str) -> None:
        """See `TrainRole.save`."""
        self._offload.need("model", "optimizer")
        self._checkpoint.save(Path(path))

    @endpoint(lane="control")
    def is_saving(self) -> bool:
        """See `TrainRole.is_saving`."""
        return self._checkpoint.is_writing

    @endpoint()
    def finish_save(self) -> None:
        """See `TrainRole.finish_save`; what was saved need not be on the device any more."""
        self._checkpoint.finish()

    @endpoint()
    def load(self, path: str, *, weights_only: bool = False) -> None:
        """See `TrainRole.load`."""
        self._offload.need("model", "optimizer")
        self._checkpoint.load(Path(path), weights_only=weights_only)

    @endpoint(execute="first")
    def rendezvous(self) -> tuple[str, int]:
        """This node's address and a free port of it."""
        from rolegraph.weights import free_port

        return self.context.address, free_port()

    @endpoint(execute="first")
    def adapter_info(self) -> AdapterInfo | None:
        """See `TrainRole.adapter_info`."""
        return None if self._adapters is None else self._adapters.info

    @endpoint(execute="first")
    def weight_manifest(self, *, adapter: bool = False) -> list[TensorInfo]:
        """Every tensor `send_weights` sends, in order."""
        return self._adapters_alone().manifest if adapter else self._export.manifest

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """Rank 0 waits until all receivers have joined."""
        from rolegraph.weights import WeightSender

        ShardedTrain.disconnect_weights(self)
        if self.context.rank == 0:
            self._sender = WeightSender(group, device=self.context.device)

    @endpoint()
    def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> float:
        """Gather on all ranks, send from rank 0; returns seconds.

        Raises WeightSyncError when a receiver is gone; the next sync connects anew.
        """
        from rolegraph.errors import TurnError, WeightSyncError

        started = time.perf_counter()
        try:
            self._offload.need("model")
        except TurnError:
            ShardedTrain.disconnect_weights(self)  # the engines are waiting already
            raise
        tensors = self._adapters_alone().tensors() if adapter else self._export.tensors()
        try:
            if self.context.rank == 0:
                if self._sender is None:
                    raise WeightSyncError("the trainer is not connected: call connect_weights first")
                self._sender.send(tensors, bucket_bytes)
        finally:
            # The other ranks gather along; so does rank 0 after a fault, or they would wait for it.
            for _ in tensors:
                pass
        return time.perf_counter() - started

    @endpoint()
    def disconnect_weights(self) -> None:
        """Leave the transfer group; nothing happens without one."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    @endpoint()
    def offload(self, model: bool, optimizer: bool) -> None:
        """See `TrainRole.offload`; on a CPU nothing moves."""
        self._offload.give(model=model, optimizer=optimizer)

    @endpoint()
    def onload(self, model: bool, optimizer: bool) -> None:
        """See `TrainRole.onload`."""
        self._offload.take(model=model, optimizer=optimizer)

    def _adapters_alone(self) -> AdapterExport:
        from rolegraph.errors import ConfigError

        if self._adapters is None:
            raise ConfigError("all weights are trained, and there is no adapter alone: set train.tuner_type=lora")
        return self._adapters

    def _resolve(self, spec: LossSpec) -> Loss:
        """The loss object of a spec; one that was asked for before is kept, with what it holds."""
        from rolegraph.losses import resolve

        if self._loss is None or self._loss[0] != spec:
            self._loss = (spec, resolve(spec))
        return self._loss[1]

    def _configure_process(self) -> None:
        """Threads, device, allocator and determinism of this process, from the thread that computes."""
        import torch

        torch.set_num_threads(self.context.threads)
        if self.context.device == "cuda":
            torch.cuda.set_device(0)
        if self.context.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            # Filling every fresh tensor is for finding reads of uninitialised memory; it costs a pass over each.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.manual_seed(self.config.seed if self.config.seed is not None else self.context.seed)
