"""`make bench`: run every benchmark of this folder in turn, or the ones named as arguments.

Timings never fail a test; each benchmark sets its figures beside the plain alternative measured in the same run.
"""

from __future__ import annotations

import importlib
import sys
import time

BENCHMARKS = ("core", "planning", "overlap", "logprob", "divergence", "train_step", "grpo", "gkd")
BENCHMARKS += ("decoding", "sampling", "checkpoint", "quickstart", "startup", "recovery")


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        started = time.monotonic()
        importlib.import_module(f"tests.benchmarks.{name}").main()
        print(f"{name}: {time.monotonic() - started:.0f} s in all\n")


if __name__ == "__main__":
    main(sys.argv[1:])
