"""A teacher on megatron-core: one instance is one rank of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rolegraph.batch import Batch
from rolegraph.interfaces import HeadInfo, TeacherRole
from rolegraph.role import endpoint
from roles.teacher.config import MegatronTeacherConfig

if TYPE_CHECKING:
    from roles.train.forward import Forward
    from roles.train.model import Model
    from roles.train.offload import Offload

Head = tuple[Batch, HeadInfo]


def first_head(heads: Sequence[Head]) -> Head:
    """Rank 0's: the others only helped to gather it."""
    return heads[0]


class MegatronTeacher(TeacherRole):
    """Scores with tensor, pipeline, data, sequence and expert parallelism. Every endpoint is collective."""

    Config: ClassVar[type[MegatronTeacherConfig]] = MegatronTeacherConfig
    config: MegatronTeacherConfig

    def setup(self) -> None:
        """Load the model; raises ConfigError where config, model and installation do not fit."""
        import torch

        torch.set_num_threads(self.context.threads)
        if self.context.device == "cuda":
            torch.cuda.set_device(0)
        from roles.train import forward, megatron_passes, model, offload

        self._model: Model = model.build_model(self.config, self.context)
        self._model.model.requires_grad_(False)
        self._forward: Forward = forward.Forward(self.config, megatron_passes.MegatronPasses(self.config, self._model))
        self._offload: Offload = offload.Offload(self._model, moves=self.context.device == "cuda")

    def teardown(self) -> None:
        """Leave all process groups."""
        from roles.train.model import leave

        leave()

    @endpoint(dispatch="dp", cost="length")
    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        """See `TeacherRole.score`."""
        self._offload.need("model")
        return self._forward.teach(batch, topk=topk, hidden=hidden, temperature=temperature)

    @endpoint(collect=first_head)
    def head(self) -> tuple[Batch, HeadInfo]:
        """See `TeacherRole.head`; gathered over the ranks that hold its parts."""
        from rolegraph.columns import fixed_size_rows
        from roles.train.teaching import as_numpy

        self._offload.need("model")
        weight = self._forward.whole_head()
        info = HeadInfo(
            vocab_size=self._model.bridge.vocab_size,
            hidden_size=int(weight.shape[1]),
            dtype=str(self._model.dtype).removeprefix("torch."),
        )
        if self.context.rank > 0:
            return Batch.from_columns({}), info
        return Batch.from_columns({"weight": fixed_size_rows(as_numpy(weight[: info.vocab_size]))}), info

    @endpoint()
    def offload(self) -> None:
        """Move the weights to host memory; on a CPU nothing moves."""
        self._offload.give(model=True, optimizer=False)

    @endpoint()
    def onload(self) -> None:
        """Move the weights back to the GPU."""
        self._offload.take(model=True, optimizer=False)
