"""vLLM's own OpenAI-compatible server, on a tiny model and a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolegraph.weights import free_port

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_server(model: str, log: Path, *arguments: str, name: str = "tiny", wait_s: float = 240.0) -> Iterator[str]:
    """A server for the model of a folder, under `name`; gives its base URL. What it says goes to the file `log`."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", model, "--served-model-name", name, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"),
        *("--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(64 * 2**20), "--generation-config", "vllm"),
        *arguments,
    ]
    with log.open("w") as written:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=written, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + wait_s
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
