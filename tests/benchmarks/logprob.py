"""Seconds and memory of `linear_logprobs` beside the plain projection and log_softmax, forward and backward.

Sizes are those of SmolLM2-135M. The floor is the three GEMMs that no implementation can leave out. The ways take turns
within each round, so that a busy machine slows all of them, and memory is what the process grows by.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rolegraph.losses import projection
from roles.train import logprob


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[tokens] the way everybody writes it first."""
    return torch.log_softmax(hidden @ weight.t(), dim=-1).gather(1, labels[:, None])[:, 0]


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: bool, budget: int) -> Tensor:
    """[tokens] without the logits of all tokens; the softmax kept up to `budget` bytes."""
    return logprob.linear_logprobs(hidden, weight, labels, entropy=entropy, budget_bytes=budget)[0]


def resident_mib() -> float:
    """Memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@contextmanager
def peak_above_start(found: list[float]) -> Iterator[None]:
    """Append the most MiB this process grew by inside, sampled every 2 ms."""
    start, done = resident_mib(), threading.Event()
    peak = [start]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        found.append(peak[0] - start)


def measure(tokens: int, columns: int, width: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds and peak MiB of each way, over `rounds` that take turns."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(columns, width) * 0.02).requires_grad_()
    labels = torch.randint(columns, (tokens,))
    logits = torch.empty(tokens, columns)
    grads = torch.empty(columns, width), torch.empty(tokens, width)

    def gemms() -> None:
        with torch.no_grad():
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits.t(), hidden, out=grads[0])
            torch.mm(logits, weight, out=grads[1])

    def step(way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(way(hidden, weight, labels).sum(), (hidden, weight))

    keep = logprob.DEFAULT_BUDGET_BYTES
    ways: dict[str, Callable[[], None]] = {
        "three GEMMs": gemms,
        "plain": lambda: step(plain),
        "ours": lambda: step(lambda *a: ours(*a, entropy=False, budget=keep)),
        "ours, with entropy": lambda: step(lambda *a: ours(*a, entropy=True, budget=keep)),
        "ours, nothing kept": lambda: step(lambda *a: ours(*a, entropy=False, budget=0)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            projection.release_buffers()
            with peak_above_start(peaks[name]):
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)
    # The first round touches every page for the first time.
    return {name: (statistics.median(seconds[name][1:]), statistics.median(peaks[name][1:])) for name in ways}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(sys.argv[1:] if __name__ == "__main__" else [])
    torch.set_num_threads(options.threads)
    results = measure(options.tokens, options.vocabulary, options.hidden, options.rounds)
    base_seconds, base_peak = results["plain"]
    print(f"logprobs of {options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, fp32")
    print(f"{'':20} {'seconds':>8} {'of plain':>9} {'peak MiB':>9} {'of plain':>9}")
    for name, (seconds, peak) in results.items():
        print(f"{name:20} {seconds:8.3f} {seconds / base_seconds:8.2f}x {peak:9.0f} {peak / base_peak:8.2f}x")


if __name__ == "__main__":
    main()
