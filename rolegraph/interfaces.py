"""The types of the whole role graph on one page: what each role can be asked, and nothing about how it does it.

A driver program holds a group of actors under one of these types and awaits its endpoints. Concrete classes live in
`roles/`; users subclass those, or these for a backend of their own. Every per-token column obeys one alignment rule:
entry i is about response token i given everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rolegraph.batch import Batch
from rolegraph.role import Role, endpoint
from rolegraph.values import (
    FAULT_REASONS,
    AdapterInfo,
    HeadInfo,
    LossSpec,
    Metrics,
    PolicyWeights,
    SamplingParams,
    StepReduce,
    TensorInfo,
    TransferGroup,
)

__all__ = [
    "FAULT_REASONS",
    "AdapterInfo",
    "HeadInfo",
    "LossSpec",
    "Metrics",
    "ORMRole",
    "PRMRole",
    "PolicyWeights",
    "RolloutRole",
    "SamplerRole",
    "SamplingParams",
    "StepReduce",
    "TeacherRole",
    "TensorInfo",
    "TrainRole",
    "TransferGroup",
    "first_rank",
]

_NO_OFFLOAD = (
    "this train role does not offload: set placement.offload_model=false and placement.offload_optimizer=false, or "
    "override offload and onload"
)
_NO_CHECKPOINTS = "this train role has no checkpoints: set checkpoint.every=null, or override save, is_saving and load"
_NO_SLEEP = "this role cannot be put to sleep: set placement.sleep_level=0, or override sleep and wake_up"


def first_rank(results: Sequence[Metrics]) -> Metrics:
    """Keep rank 0's metrics: train ranks reduce theirs over the whole group before they return."""
    return results[0]


class TrainRole(Role):
    """A policy under training: SPMD ranks that hold shards of one model."""

    can_be_replaced = False

    @endpoint(dispatch="dp", collect=first_rank, cost="length")
    def step(
        self,
        batch: Batch,
        *,
        loss: LossSpec,
        temperature: float = 1.0,
        lr: float | None = None,
    ) -> Metrics:
        """Take one optimizer step on the global batch; `lr` overrides the schedule for this step.

        Metrics are global (reduced over ranks): those of the loss, and grad_norm, lr, tokens, rows.
        """
        raise NotImplementedError

    @endpoint(dispatch="dp", cost="length")
    def logprobs(
        self, batch: Batch, *, temperature: float = 1.0, reference: bool = False, entropy: bool = False
    ) -> Batch:
        """Score the responses; returns a batch of the same rows with new columns. Natural log, at `temperature`.

        `logprobs` of the current weights, and with `entropy` the column of that name (nats); or, with `reference`,
        `ref_logprobs` from the reference weights, and where the batch has `logprobs`, the light column `ref_kl`: the
        row's sum of logprobs - ref_logprobs over the masked tokens.
        """
        raise NotImplementedError

    @endpoint()
    def reset_optimizer(self) -> None:
        """Forget optimizer moments and start the learning-rate schedule over (between a warm start and RL)."""
        raise NotImplementedError

    @endpoint()
    def save_reference(self) -> None:
        """Make the weights of now the reference weights."""
        raise NotImplementedError

    @endpoint(dispatch="dp", cost="length")
    def teach(
        self, batch: Batch, *, weights: PolicyWeights, topk: int = 0, hidden: bool = False, temperature: float = 1.0
    ) -> Batch:
        """`TeacherRole.score` by the policy itself, with one of its sets of weights."""
        raise NotImplementedError

    @endpoint()
    def average_weights(self, decay: float) -> None:
        """Move the average of the weights towards those of now: average = decay * average + (1 - decay) * weights."""
        raise NotImplementedError

    @endpoint()
    def use_teacher_head(self, head: Batch | PolicyWeights, info: HeadInfo | None = None) -> None:
        """How the teacher's hidden states become logits in `step`: by a teacher's head, or by one of the policy's own.

        Each rank keeps the rows of the vocabulary that it holds of the policy's.
        """
        raise NotImplementedError

    @endpoint()
    def export_hf(self, path: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face folder: weights (an adapter merged into them), config and tokenizer.

        With `adapter` the adapter alone, as PEFT reads it; ConfigError where there is none.
        """
        raise NotImplementedError

    @endpoint()
    def save(self, path: str) -> None:
        """Begin to save everything that later steps depend on into the folder `path`, which exists and is empty.

        Weights, those of the reference and of the average where they are not those of the start, the optimizer, the
        place in the schedule, and the states of random generators. Returns as soon as training may go on: what is
        written is the state of now. `finish_save` ends it, and one save runs at a time.
        """
        raise NotImplementedError(_NO_CHECKPOINTS)

    @endpoint(lane="control")
    def is_saving(self) -> bool:
        """Whether this rank still writes; answered while the main lane computes."""
        raise NotImplementedError(_NO_CHECKPOINTS)

    @endpoint()
    def finish_save(self) -> None:
        """Wait for the writes, and make the folder complete; nothing happens where nothing is being saved.

        Raises CheckpointError where a rank could not write (a full disk): the folder is then worth nothing, the weights
        are as they were, and another save may begin.
        """
        raise NotImplementedError(_NO_CHECKPOINTS)

    @endpoint()
    def load(self, path: str, *, weights_only: bool = False) -> None:
        """Take back what `save` wrote, of this layout of ranks or of another; `weights_only` leaves the rest as it is.

        Raises CheckpointError where the folder is not whole, or of another model.
        """
        raise NotImplementedError(_NO_CHECKPOINTS)

    @endpoint(execute="first")
    def adapter_info(self) -> AdapterInfo | None:
        """The adapter under training; null where all weights are."""
        raise NotImplementedError

    @endpoint(execute="first")
    def rendezvous(self) -> tuple[str, int]:
        """Host and a free port of the rank that sends weights."""
        raise NotImplementedError

    @endpoint(execute="first")
    def weight_manifest(self, *, adapter: bool = False) -> list[TensorInfo]:
        """Every tensor `send_weights` will send, in order; with `adapter` those of the adapter, under PEFT's names."""
        raise NotImplementedError

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """Rank 0 joins the transfer group as its rank 0; the other ranks do nothing."""
        raise NotImplementedError

    @endpoint()
    def send_weights(self, bucket_bytes: int, *, adapter: bool = False) -> float:
        """Gather each weight over the model-parallel ranks and broadcast it from rank 0; returns seconds.

        An adapter is merged into them; with `adapter` it is sent alone.
        """
        raise NotImplementedError

    @endpoint()
    def disconnect_weights(self) -> None:
        """Leave the transfer group, so that the next sync starts a fresh one."""
        raise NotImplementedError

    @endpoint()
    def offload(self, model: bool, optimizer: bool) -> None:
        """Give device memory to the roles that share it: weights (and reference weights), or optimizer state, or both.

        Called between phases, when nothing computes. What is given away moves to host memory and comes back bit for
        bit; gradients have no use between steps and are dropped with either. What is away already stays away. Until
        `onload`, endpoints that need it raise TurnError. A backend that cannot do this leaves it as it is here, and its
        users set `placement.offload_model=false placement.offload_optimizer=false`.
        """
        raise NotImplementedError(_NO_OFFLOAD)

    @endpoint()
    def onload(self, model: bool, optimizer: bool) -> None:
        """Take back what `offload` gave away; what is there stays."""
        raise NotImplementedError(_NO_OFFLOAD)


class RolloutRole(Role):
    """Engines that sample from the policy; each actor is one replica."""

    queue_rows_alone: ClassVar[int] = 16
    """Prompts. Calls that arrive one by one start one by one: steps with a part of the batch, and threads that take
    turns with the engine's."""

    @endpoint(dispatch="queue")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        """Draw `sampling.n` responses a prompt; n rows a prompt row, in prompt order.

        Reads `prompt_ids` and keeps the other columns. Adds repeat, step, response_ids, response_mask,
        rollout_logprobs, finish_reason, weight_version, weight_version_last, response_length and length.
        """
        raise NotImplementedError

    @endpoint(lane="control")
    def abort(self) -> int:
        """End all running requests; their rows come back with finish_reason `abort`. Returns how many."""
        raise NotImplementedError

    @endpoint()
    def transfer_workers(self) -> tuple[int, int]:
        """This replica's rank, and how many engine processes of it receive weights."""
        raise NotImplementedError

    @endpoint()
    def connect_weights(self, group: TransferGroup) -> None:
        """Join the transfer group with every engine process of this replica."""
        raise NotImplementedError

    @endpoint()
    def receive_weights(
        self, manifest: list[TensorInfo], bucket_bytes: int, version: int, *, adapter: AdapterInfo | None = None
    ) -> float:
        """Load the weights the trainer sends, reset the prefix cache, take `version`; returns seconds.

        With `adapter` they are an adapter's, which replaces the one before it beside weights that stay.
        """
        raise NotImplementedError

    @endpoint()
    def disconnect_weights(self) -> None:
        """Leave the transfer group."""
        raise NotImplementedError

    @endpoint()
    def sleep(self, level: int) -> None:
        """Give weights and KV cache to the roles that share the device; no sample may be running.

        Level 1 keeps the weights in host memory. Level 2 drops them: until a sync has brought them back, `generate`
        raises TurnError, awake or not. What a prefix cache held is gone either way. At level 0, and when asleep
        already, nothing happens. A backend that cannot do this leaves it as it is here, and its users set
        `placement.sleep_level=0`.
        """
        raise NotImplementedError(_NO_SLEEP)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """Take the memory of `weights`, of the `kv_cache`, or of both back; what is awake stays so.

        A weight sync needs the weights awake, `generate` both.
        """
        raise NotImplementedError(_NO_SLEEP)


class TeacherRole(Role):
    """A model that scores the student's responses; it is never trained."""

    @endpoint(dispatch="queue")
    def score(self, batch: Batch, *, topk: int = 0, hidden: bool = False, temperature: float = 1.0) -> Batch:
        """What the teacher thinks of every response token; returns the new columns alone, for `Batch.merge`.

        The teacher reads `teacher_prompt_ids` where a row has them, else `prompt_ids`, and then `response_ids`. Always
        `teacher_token_logprobs`: of the response tokens, natural log, at `temperature`. With `topk`: `teacher_ids` and
        `teacher_logprobs`, the K likeliest tokens a position, likeliest first. With `hidden`: `teacher_hidden`, the
        states after the final norm that predict each response token, [tokens, hidden_size]; `head` turns them into
        logits.
        """
        raise NotImplementedError

    @endpoint(execute="first")
    def head(self) -> tuple[Batch, HeadInfo]:
        """The output head: a row a vocabulary entry, `weight` [vocab, hidden_size], and `bias` where there is one."""
        raise NotImplementedError

    @endpoint()
    def offload(self) -> None:
        """Make room on the device."""
        raise NotImplementedError

    @endpoint()
    def onload(self) -> None:
        """Take the device back."""
        raise NotImplementedError


class SamplerRole(Role):
    """Draws candidates for a sampling graph, from a model that nobody trains; each actor is one replica."""

    @endpoint(dispatch="queue")
    def sample(self, batch: Batch, sampling: SamplingParams) -> Batch:
        """Draw candidates: `sampling.n` a row, or those that the column `repeats` (list<int32>) names.

        Reads `prompt_ids`, or `messages` (else `prompt`) where the backend takes text, and keeps the other columns but
        `repeats`. A row a candidate comes back, in the order of the rows and of their repeats, with `repeat`, `step`,
        `response_text` (no special tokens), `finish_reason` and `response_length` (tokens; null where a service does
        not say). Samplers that have the tokens add response_ids, response_mask, rollout_logprobs, prompt_length and
        length. A candidate that could not be drawn has a null `response_text`, finish_reason `error`, and the reason in
        `sample_fault` (string, null elsewhere); it is a row like the others. With `sampling.seed` a candidate is the
        same whatever is drawn beside it, up to rounding.
        """
        raise NotImplementedError

    @endpoint()
    def sleep(self, level: int) -> None:
        """Give weights and KV cache to the roles that share the device, as `RolloutRole.sleep` does at level 1.

        Level 2 drops weights that nobody would bring back: TurnError.
        """
        raise NotImplementedError(_NO_SLEEP)

    @endpoint()
    def wake_up(self, parts: tuple[str, ...]) -> None:
        """Take the memory of `weights`, of the `kv_cache`, or of both back; `sample` needs both."""
        raise NotImplementedError(_NO_SLEEP)


class PRMRole(Role):
    """Process rewards: a number for each step of a response."""

    @endpoint(dispatch="queue")
    def score(self, batch: Batch, *, reduce: StepReduce = "min") -> Batch:
        """Score the steps of each response, and say with `reduce` what they amount to.

        Reads `response_text`, or decodes `response_ids` where that is missing. Adds `step_scores` (list<float64>, one a
        step, null where it has none), `prm_score` (float64: `step_scores` reduced; null where one of them is, or there
        is none), `prm_fault` (string, why it is null; null elsewhere), and where the batch has `response_ids`,
        `step_ends` (list<int32>): the response token behind the last one of each step, the last of them being
        the response's length. Raises AlignmentError, naming the uid, where a model or function gives another number of
        scores than the response has steps.
        """
        raise NotImplementedError

    @endpoint()
    def offload(self) -> None:
        """Make room on the device; a role that holds nothing there has nothing to do."""

    @endpoint()
    def onload(self) -> None:
        """Take the device back."""


class ORMRole(Role):
    """Outcome rewards: one number a response and reward function (or model, or judge)."""

    @endpoint(dispatch="queue")
    def score(self, batch: Batch) -> Batch:
        """Score each row with every function.

        Reads `response_text`, or decodes `response_ids` where that is missing. Adds `rewards/NAME` (float64, null where
        a function gave none) and `reward_faults/NAME` (int8, 0, or why it gave none, see `FAULT_REASONS`) a function,
        `reward` (their weighted sum over the rewards that are there; null when none is), `reward_faults` (int32,
        functions that gave no reward for the row), `reward_reasons` (string: NAME: reason; ...) and `response_text`.
        """
        raise NotImplementedError

    @endpoint()
    def offload(self) -> None:
        """Make room on the device; a role that holds nothing there has nothing to do."""

    @endpoint()
    def onload(self) -> None:
        """Take the device back."""
