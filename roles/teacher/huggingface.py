"""A teacher that transformers runs: any causal language model, forward only."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rolegraph.batch import Batch
from rolegraph.errors import ConfigError
from rolegraph.interfaces import HeadInfo, TeacherRole
from rolegraph.role import endpoint
from roles.frozen import FrozenModel
from roles.logits import head_rule, mismatch, probe
from roles.teacher.config import HuggingFaceTeacherConfig

if TYPE_CHECKING:
    from torch import Tensor

    from roles.train.scoring import TokenScores

_log = logging.getLogger(__name__)


class HuggingFaceTeacher(TeacherRole):
    """A replica of the model.

    Rows are padded on the right and scored a few at a time; logits exist for a chunk of response positions at a time.
    """

    Config: ClassVar[type[HuggingFaceTeacherConfig]] = HuggingFaceTeacherConfig
    config: HuggingFaceTeacherConfig
    queue_rows: ClassVar[int] = 8
    queue_in_flight: ClassVar[int] = 1

    def setup(self) -> None:
        """Load the model; raises ConfigError for one whose logits are more than a projection of its hidden states."""
        from transformers import AutoModelForCausalLM

        self._frozen = FrozenModel(
            AutoModelForCausalLM, self.config.folder, self.config.dtype, self.context, spread=True
        )
        self._model: Any = self._frozen.model
        self._body = self._model.get_decoder()
        self._keeps_cache = "use_cache" in inspect.signature(self._body.forward).parameters
        head, rule = self._model.get_output_embeddings(), head_rule(self._model)
        self._head: Any = head
        self._info = HeadInfo(
            vocab_size=int(head.weight.shape[0]),
            hidden_size=int(head.weight.shape[1]),
            dtype="bfloat16" if self._frozen.dtype == "bfloat16" else "float32",
            scale=rule.scale,
            soft_cap=rule.soft_cap,
        )
        self._check_head()

    @endpoint(dispatch="queue")
    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        """See `TeacherRole.score`."""
        from roles.train.microbatch import plan_microbatches
        from roles.train.teaching import score_columns, seen_by_teacher

        rows = seen_by_teacher(batch, self._info.vocab_size)
        lengths = rows.ragged("prompt_ids").lengths + rows.ragged("response_ids").lengths
        limit = max(self.config.max_tokens_per_micro_batch, int(lengths.max(initial=0)))
        plan = plan_microbatches(lengths.tolist(), tokens_per=limit)
        parts = [(part, self._score(rows, part, topk, hidden, temperature)) for part in plan if part]
        return score_columns(rows, parts)

    @endpoint(execute="first")
    def head(self) -> tuple[Batch, HeadInfo]:
        """See `TeacherRole.head`."""
        from rolegraph.columns import fixed_size_rows
        from roles.train.teaching import as_numpy

        columns: dict[str, Any] = {"weight": fixed_size_rows(as_numpy(self._head.weight))}
        if getattr(self._head, "bias", None) is not None:
            columns["bias"] = self._head.bias.float().cpu().numpy()
        return Batch.from_columns(columns), self._info

    @endpoint()
    def offload(self) -> None:
        """Move the model to host memory; without a GPU it stays where it is."""
        self._frozen.move(away=True)

    @endpoint()
    def onload(self) -> None:
        """Move the model back to its GPU."""
        self._frozen.move(away=False)

    def _score(self, batch: Batch, rows: Sequence[int], topk: int, hidden: bool, temperature: float) -> TokenScores:
        import torch

        from roles.train.packing import collate
        from roles.train.scoring import Shard, score_tokens

        micro = collate(batch, rows, padding_free=False)
        lengths = (batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths)[np.asarray(rows)]
        width = micro.input_ids.shape[1]
        mask = torch.arange(width)[None, :] < torch.as_tensor(lengths)[:, None]
        states = self._states(micro.input_ids, mask, micro.position_ids)
        selected = states.reshape(-1, states.shape[-1]).index_select(0, micro.predict.to(states.device))
        labels = micro.labels.to(states.device)
        shard = Shard(self._info.vocab_size)
        return score_tokens(
            selected, self._logits, labels, shard, topk=topk, keep_hidden=hidden, temperature=temperature
        )

    def _states(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """[batch, seq, hidden] after the final norm."""
        import torch

        extra = {"use_cache": False} if self._keeps_cache else {}
        device = self._model.get_input_embeddings().weight.device
        with torch.no_grad():
            output = self._body(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device, torch.long),
                position_ids=position_ids.to(device),
                **extra,
            )
        states: Tensor = output.last_hidden_state
        return states

    def _logits(self, states: Tensor) -> Tensor:
        """[tokens, vocabulary] float32."""
        import torch

        logits: Tensor = self._head(states.to(self._head.weight.device)).float() * self._info.scale
        cap = self._info.soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _check_head(self) -> None:
        """Compare a projected sequence with the model's own logits."""
        import torch

        ids = probe(self._info.vocab_size)
        mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1])[None]
        device = self._model.get_input_embeddings().weight.device
        with torch.no_grad():
            theirs = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[0]
        error = mismatch(theirs, self._logits(self._states(ids, mask, positions)[0]).to(theirs.device))
        if error is not None:
            raise ConfigError(
                f"teacher.model={self.config.model}: its logits are not a projection of its last hidden states (they "
                f"differ by {error:.3g}), and nothing here knows what else {type(self._model).__name__} does to them: "
                "choose teacher=vllm"
            )
