"""Running a model over a rank's rows: how they are cut into micro-batches, and what a teacher tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rolegraph.batch import Batch
from roles.train.metrics import gather_counts
from roles.train.microbatch import plan_microbatches, tokens_that_fit
from roles.train.options import RanksConfig
from roles.train.packing import MicroBatch, collate, response_tokens, shared_prompts
from roles.train.passes import Finish, Passes
from roles.train.scoring import Shard, TokenScores, head_logits, score_tokens
from roles.train.teaching import score_columns, seen_by_teacher


class Plan(NamedTuple):
    """How this rank works through its rows; every data-parallel rank has as many micro-batches."""

    rows: list[list[int]]
    tokens: float
    """Trained response tokens of the whole global batch."""
    samples: float
    """Rows of the global batch with such a token."""
    all_rows: int


class Forward:
    """Passes over a rank's rows; every rank of the mesh takes part in each."""

    def __init__(self, config: RanksConfig, passes: Passes) -> None:
        self.config = config
        self.passes = passes
        self._tokens = self._slots = 0

    @torch.no_grad()
    def teach(self, batch: Batch, *, topk: int, hidden: bool, temperature: float) -> Batch:
        """The columns of `TeacherRole.score` for this rank's rows, from the weights the model has now."""
        rows = seen_by_teacher(batch, self.passes.vocab_size)
        plan = self._plan(rows)
        finish = partial(self._teach, topk=topk, hidden=hidden, temperature=temperature)
        scores: list[TokenScores] = self._run(rows, plan, finish, train=False)
        scores = self.passes.on_every_stage(lambda: scores)
        return score_columns(rows, list(zip(plan.rows, scores, strict=True)))

    def _teach(
        self, micro: MicroBatch, states: Tensor, *, topk: int, hidden: bool, temperature: float
    ) -> tuple[Tensor, TokenScores]:
        states = self.passes.predicting(micro, states)
        head, group = self.passes.head(), self.passes.vocab_group
        rows = len(head.weight)
        first = rows * (0 if group is None else group.rank())
        shard = Shard(columns=min(max(self.passes.vocab_size - first, 0), rows), first=first, group=group)
        scores = score_tokens(
            states,
            partial(head_logits, head),
            micro.labels,
            shard,
            topk=topk,
            keep_hidden=hidden,
            temperature=temperature,
        )
        return states.new_zeros(()), scores.cpu()

    @torch.no_grad()
    def whole_head(self) -> Tensor:
        """[padded vocabulary, h] the output weight, gathered over tensor-parallel ranks, on every rank."""
        group = self.passes.vocab_group
        if self.passes.last_stage:
            whole = self.passes.head().weight.contiguous()
            parts = [whole]
            if group is not None:
                parts = [torch.empty_like(whole) for _ in range(group.size())]
                dist.all_gather(parts, whole, group=group)
            whole = torch.cat(parts)  # a copy where there is one part too: later steps do not change it
        return self.passes.on_every_stage(lambda: whole.cpu())  # type: ignore[no-any-return]

    def _plan(self, batch: Batch) -> Plan:
        """Cut this rank's rows; the ranks agree on totals and on the number of micro-batches."""
        config, layout = self.config, self.passes.layout
        lengths = np.diff(batch.ragged("prompt_ids").offsets) + np.diff(batch.ragged("response_ids").offsets)
        rows_per, tokens_per = config.micro_batch_size, config.max_tokens_per_micro_batch
        if rows_per is None and tokens_per is None:
            tokens_per = tokens_that_fit(int(lengths.max(initial=1)), layout.token_bytes, layout.multiple_of)
        cut = partial(
            plan_microbatches,
            lengths.tolist(),
            rows_per=rows_per,
            tokens_per=tokens_per,
            padding_free=layout.padding_free,
            multiple_of=layout.multiple_of,
            shared=shared_prompts(batch).tolist() if layout.share_prompts else None,
        )
        rows = cut()
        tokens, samples = response_tokens(batch).totals() if len(batch) else (0.0, 0.0)
        counts = gather_counts([tokens, samples, len(batch), len(rows)], self.passes.data_group, self.passes.device)
        most = max(int(counts[:, 3].max()), 1)
        if len(rows) != most:
            rows = cut(count=most)
        all_tokens, all_samples, all_rows, _ = counts.sum(0).tolist()
        return Plan(rows, all_tokens, all_samples, int(all_rows))

    def _run(self, batch: Batch, plan: Plan, finish: Finish, *, train: bool) -> list[Any]:
        """What `finish` returned for each micro-batch, on the last stage."""
        return self.passes.run(self._micro_batches(batch, plan), len(plan.rows), finish, train=train)

    def _micro_batches(self, batch: Batch, plan: Plan) -> Iterator[MicroBatch]:
        self._tokens = self._slots = 0
        layout = self.passes.layout
        for rows in plan.rows:
            micro = collate(
                batch,
                rows,
                padding_free=layout.padding_free,
                share_prompts=layout.share_prompts,
                multiple_of=layout.multiple_of,
            )
            self._slots += micro.input_ids.numel()
            self._tokens += micro.tokens
            yield micro.to(self.passes.device)
