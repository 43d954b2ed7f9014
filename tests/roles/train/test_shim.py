"""What importing Megatron on a CPU brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import sys
from roles.train import model
from roles.train import adapters_out, checkpoint, megatron_passes, offload, trainer, weights_out
heavy = ("wandb", "transformers.modeling_utils", "mbridge.models.glm4_vl", "torch._inductor")
print("loaded:", [name for name in heavy if name in sys.modules])
from roles.train import bridge
from transformers import Qwen3Config
print(bridge.bridge_class(Qwen3Config()).__name__)
"""


def test_what_this_role_never_asks_for_is_not_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loaded: []" in done.stdout
    assert "Transformer Engine" not in done.stderr, "Megatron's warnings about what CPUs do not need"
    assert "QwenBridge3" in done.stdout
