"""Seconds and memory of `linear_generalized_jsd` beside the plain loss, TRL's and Liger's, forward and backward.

Both gradients, of the student's hidden states and of its head. Each way runs in a process of its own, whose growth
beyond the inputs is the memory: the head's gradient is part of it. The floor is the four GEMMs that no implementation
can leave out. `--large` runs the sizes of a 150,000-word vocabulary with our way alone: what the others need does not
fit most machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rolegraph.losses.divergence import linear_generalized_jsd
from tests.benchmarks.logprob import peak_above_start
from tests.benchmarks.measure import show

BETA = 0.5
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """What is compared, by how many threads."""

    tokens: int
    hidden: int
    vocabulary: int
    threads: int
    rounds: int

    @property
    def head_mib(self) -> float:
        """The head's gradient in fp32."""
        return self.vocabulary * self.hidden * 4 / 2**20


def plain(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Project, softmax, and the formula as it stands in the papers."""
    student = torch.log_softmax(hidden @ head.t(), dim=-1)
    teacher = torch.log_softmax(teacher_hidden @ teacher_head.t(), dim=-1)
    mixture = torch.log(BETA * teacher.exp() + (1 - BETA) * student.exp())
    divergence = BETA * (teacher.exp() * (teacher - mixture)) + (1 - BETA) * (student.exp() * (student - mixture))
    return divergence.sum() / len(hidden)


def trl(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """TRL's loss on the logits."""
    from trl.experimental.gkd import GKDTrainer

    loss: Tensor = GKDTrainer.generalized_jsd_loss(
        (hidden @ head.t())[None], (teacher_hidden @ teacher_head.t())[None], beta=BETA
    )
    return loss


def liger(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    """Liger's chunked loss in pure torch: no Triton, so it runs on a CPU. It asks for labels, of no weight here.

    Install it with `pip install --no-deps "liger-kernel>=0.8.5,<0.9"`.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    way = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA, compiled=False)
    labels = torch.zeros(len(hidden), dtype=torch.long)
    loss: Tensor = way(hidden, head, teacher_hidden, teacher_head, labels)
    return loss


def ours(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, *, metrics: bool) -> Tensor:
    """Chunked, the gradient in the same pass."""
    found = linear_generalized_jsd(hidden, head, teacher_hidden, teacher_head, beta=BETA, metrics=metrics)
    return found.loss / len(hidden)


WAYS: dict[str, Way] = {
    "plain": plain,
    "TRL generalized_jsd_loss": trl,
    "Liger LigerFusedLinearJSDLoss": liger,
    "ours": lambda *inputs: ours(*inputs, metrics=False),
    "ours, with metrics": lambda *inputs: ours(*inputs, metrics=True),
}
FLOOR = "four GEMMs"


def run_one(name: str, size: Size) -> dict[str, float]:
    """Median seconds, the most MiB beyond the inputs, and the loss, of one way in this process."""
    torch.set_num_threads(size.threads)
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, requires_grad=True)
    head = torch.randn(size.vocabulary, size.hidden).mul_(0.04).requires_grad_()
    teacher_hidden = torch.randn(size.tokens, size.hidden)
    teacher_head = torch.randn(size.vocabulary, size.hidden).mul_(0.04)
    loss = torch.zeros(())

    def gemms() -> None:
        with torch.no_grad():
            logits = torch.mm(hidden, head.t())
            torch.mm(teacher_hidden, teacher_head.t(), out=logits)
            torch.mm(logits.t(), hidden)
            torch.mm(logits, head)

    def step() -> None:
        nonlocal loss
        if name == FLOOR:
            return gemms()
        loss = WAYS[name](hidden, head, teacher_hidden, teacher_head)
        loss.backward()
        hidden.grad = head.grad = None
        return None

    # Imports, threads and buffers of the libraries are no memory of the loss.
    small = [tensor[:64].detach().requires_grad_() for tensor in (hidden, head, teacher_hidden, teacher_head)]
    if name != FLOOR:
        WAYS[name](*small).backward()
    seconds: list[float] = []
    peaks: list[float] = []
    for _ in range(size.rounds):
        with peak_above_start(peaks):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds), "mib": peaks[0], "loss": loss.item()}


def measure(names: list[str], size: Size) -> list[tuple[object, ...]]:
    """One row a way, each run in a process of its own."""
    rows: list[tuple[object, ...]] = []
    for name in names:
        command = [sys.executable, "-m", "tests.benchmarks.divergence", "--one", name, json.dumps(asdict(size))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            rows.append((name, "failed:", done.stderr.strip().splitlines()[-1][:60], "", ""))
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name}: {found['seconds']:.2f} s", file=sys.stderr)
        rows.append((name, found["seconds"], found["mib"], found["mib"] - size.head_mib, f"{found['loss']:.6f}"))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", nargs="+", metavar="WAY", help=f"of: {', '.join([FLOOR, *WAYS])}")
    parser.add_argument("--large", action="store_true", help="8,192 tokens, hidden 1,024, vocabulary 151,936: minutes")
    options = parser.parse_args(sys.argv[1:] if __name__ == "__main__" else [])
    if options.one:
        print(json.dumps(run_one(options.one[0], Size(**json.loads(options.one[1])))))
        return
    size = Size(options.tokens, options.hidden, options.vocabulary, options.threads, options.rounds)
    names = options.ways or [FLOOR, *WAYS]
    if options.large:
        size, names = Size(8192, 1024, 151_936, options.threads, 1), options.ways or ["ours"]
    title = f"JSD of {size.tokens} tokens, hidden {size.hidden}, vocabulary {size.vocabulary}, fp32, both gradients"
    show(title, ("", "seconds", "peak MiB", "less the head's gradient", "loss"), measure(names, size))


if __name__ == "__main__":
    main()
