"""What offloading takes of the driver and of other GPUs, and the command that tries all of it."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_offload.cli.main import app
from hf_offload.storage import buffers
from hf_offload.storage.buffers import pinned_empty

pytestmark = pytest.mark.gpu


class _Runtime:
    """CUDA's runtime, noting what is registered."""

    def __init__(self, runtime):
        self._runtime = runtime
        self.cudaError = runtime.cudaError
        self.registered = {}

    def cudaHostRegister(self, address, nbytes, flags):
        failure = self._runtime.cudaHostRegister(address, nbytes, flags)
        self.registered[address] = nbytes
        return failure

    def cudaHostUnregister(self, address):
        failure = self._runtime.cudaHostUnregister(address)
        assert failure == self.cudaError.success
        del self.registered[address]
        return failure


@pytest.mark.parametrize("nbytes", [1, 4097, (5 << 20) + 3])
def test_pinned_memory_has_its_size_and_is_given_back(nbytes, monkeypatch):
    torch.cuda.init()
    runtime = _Runtime(torch.cuda.cudart())
    monkeypatch.setattr(buffers.torch.cuda, "cudart", lambda: runtime)
    buffer = pinned_empty(nbytes)
    assert buffer.is_pinned()
    assert buffer.untyped_storage().nbytes() == nbytes
    assert runtime.registered == {buffer.data_ptr(): nbytes}
    there = torch.arange(nbytes, device="cuda").to(torch.uint8)
    buffer.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer, there.cpu())
    part = buffer[nbytes // 2 :]
    del buffer
    assert runtime.registered, "a view still uses it"
    assert part.is_pinned()
    del part
    assert runtime.registered == {}


_ON_THE_SECOND = """
import torch
from torch import nn
from hf_offload import OffloadConfig, attach

torch.cuda.set_device(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))).to("cuda:1")
session = attach(model, OffloadConfig(min_bytes=0, read_ahead_bytes=0, **{settings!r}))
for _ in range(3):
    model(torch.ones(512, 256, device="cuda:1")).sum().backward()
    session.end_step()
assert session.stats.total.loaded_bytes > 0
session.detach()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "some 500 MiB of GPU 0 for each rank"
"""


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_threads_wake_no_other_gpu(tier, tmp_path):
    """In a thread that has no device yet, whatever names one goes back to device 0 afterwards: that makes a context."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    settings = {"tier": tier, "ram_budget": 1 << 28} if tier == "ram" else {"tier": tier, "directory": str(tmp_path)}
    code = _ON_THE_SECOND.format(settings=settings)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_everything_works_on_this_device(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--check", "--directory", str(tmp_path)])
    assert result.exit_code == 0, result.stdout
    assert "Everything works on this device." in result.stdout
