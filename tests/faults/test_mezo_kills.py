"""A MeZO whose weights are on a drive is killed at any moment, and resumes to the same bits; damaged logs are refused."""

import multiprocessing
import random
import signal
import time

import pytest
import torch

from hf_offload import OffloadConfig, attach
from hf_offload.methods.mezo import MeZO
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

STEPS = 12
KILLS = 4


def train(folder, steps, resume):
    """Save after each step, and go on from there."""
    torch.set_num_threads(1)
    saved = folder / "saved.pt"
    model = tiny_model("gpt2")
    config = OffloadConfig(tier="none", params="ssd", directory=str(folder), min_bytes=1024, memory_budget="1KiB")
    session = attach(model, config)
    optimizer = MeZO(model.parameters(), model, eps=1e-2, lr=1e-2, weight_decay=0.1)
    if resume and saved.exists():
        found = torch.load(saved, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    while len(optimizer.log.rows) < steps:
        number = len(optimizer.log.rows)
        optimizer.step(lambda: model(**tiny_batch("gpt2", seed=number)).loss)  # noqa: B023
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "unfinished.pt")
        (folder / "unfinished.pt").replace(saved)
    session.detach()
    return model, optimizer


@pytest.mark.full
def test_it_is_killed_at_random_moments_and_resumes_to_the_same_bits(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "hf_offload", "tests.helpers.tiny_models"])
    moments = random.Random(0)
    killed = 0
    for _ in range(KILLS):
        process = context.Process(target=train, args=(tmp_path, STEPS, True))
        process.start()
        before = (tmp_path / "saved.pt").stat().st_mtime_ns if (tmp_path / "saved.pt").exists() else 0
        while process.is_alive() and (
            not (tmp_path / "saved.pt").exists() or (tmp_path / "saved.pt").stat().st_mtime_ns == before
        ):
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed
    model, optimizer = train(tmp_path, STEPS, True)
    (tmp_path / "whole").mkdir()
    expected, whole = train(tmp_path / "whole", STEPS, False)
    assert optimizer.log == whole.log
    found, expected = weights(model), weights(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
