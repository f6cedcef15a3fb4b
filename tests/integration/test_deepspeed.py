"""DeepSpeed's ZeRO on a CPU, where it is installed: the same losses with offloading, to the last bit."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from hf_offload import OffloadPlugin
from tests.helpers.tiny_models import tiny_batch, tiny_model

stage, tier = int(sys.argv[1]), sys.argv[2]
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1))
offloaded = OffloadPlugin(tier=tier, min_bytes=0).attach(accelerator)
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
torch.manual_seed(0)
model = tiny_model("llama")
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(4):
    loss = model(**tiny_batch("llama", seed=step)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
for session in offloaded.sessions:
    session.end_pending_step()
    print("steps", session.stats.ended_steps, session.stats.total.offloaded_bytes > 0)
"""


def run(stage, tier, tmp_path, port):
    environment = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stage), tier], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("loss ")], [line for line in lines if line.startswith("steps ")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage, tmp_path):
    expected, nothing = run(stage, "none", tmp_path, 29600 + stage)
    found, steps = run(stage, "ssd", tmp_path, 29610 + stage)
    assert len(expected) == 4
    assert found == expected
    assert (nothing, steps) == ([], ["steps 4 True"])
