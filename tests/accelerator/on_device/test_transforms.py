"""Dropout that is made again on devices whose kernels scale as they please, and rows that are drawn there."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload import RecomputeElementwiseConfig
from hf_offload.transforms.rematerialization import functions
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.rematerialization.functions import dropout_again, packed_dropout
from hf_offload.transforms.sampling.linear import draw_rows

DEVICE = torch.device("late:0")


def as_on_cuda(kept: float) -> float:
    """CUDA's kernel gets a number of 32 bits, and its reciprocal is one, too."""
    return (1 / torch.tensor(kept, dtype=torch.float32)).item()


def as_in_backward(kept: float) -> float:
    return 1 / kept


def as_nowhere(kept: float) -> float:
    return 1.01 / kept


@pytest.fixture(params=[as_on_cuda, as_in_backward, as_nowhere])
def kernel(late, request):
    """Another dropout for the late device, in place of the CPU's."""

    def dropout(inputs: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.empty(inputs.shape, dtype=torch.bool, device="cpu").bernoulli_(1 - p).to(inputs.device)
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        return (wide * mask * request.param(1 - p)).to(inputs.dtype), mask

    functions._kernels_scale.cache_clear()
    library = torch.library.Library("aten", "IMPL")
    library.impl("native_dropout", dropout, "PrivateUse1")
    yield request.param
    library._destroy()
    functions._kernels_scale.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_made_again_has_the_bits_of_the_kernel(kernel, dtype):
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    for percent in (5, 10, 15, 30, 50, 70, 85):
        probability = percent / 100
        before = torch.get_rng_state()
        again = dropout_again(values, probability)
        assert torch.equal(torch.get_rng_state(), before)
        if kernel is as_nowhere:
            assert again is None
            continue
        assert again is not None, probability
        result, bits = packed_dropout(values, probability)
        assert torch.equal(again(values, bits), result), probability


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_a_cpu_does_for_a_device_is_made_again(late, dtype):
    """Its kernel rounds the scale to the precision of the tensor, and that of backward does not."""
    functions._kernels_scale.cache_clear()
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    for percent in (5, 10, 15, 30, 50, 70, 85):
        again = dropout_again(values, percent / 100)
        assert again is not None, percent
        result, bits = packed_dropout(values, percent / 100)
        assert torch.equal(again(values, bits), result), percent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lean_model_has_the_gradients_of_the_usual_one(kernel, dtype):
    torch.manual_seed(0)
    layers = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.15), nn.Linear(32, 8)
    usual = nn.Sequential(*layers).to(dtype).to(DEVICE)
    model = copy.deepcopy(usual)
    lean = Rematerialization(model, RecomputeElementwiseConfig(("norms", "dropout")))
    lean.apply()
    found = []
    for one in (usual, model):
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
        torch.manual_seed(7)
        one(x).square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in one.parameters()])
    assert all(map(torch.equal, *found))


def test_nothing_is_tried_where_it_cannot_be(late, monkeypatch):
    monkeypatch.setattr(functions, "_kernels_scale", lambda *_: pytest.fail("tried"))
    values = torch.ones(8, device=DEVICE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert dropout_again(torch.empty(8, device=DEVICE), 0.15) is not None
    monkeypatch.setattr("hf_offload.engine.device.AcceleratorDevice.is_capturing", lambda _: True)
    assert dropout_again(values, 0.15) is None


def test_a_backend_whose_generator_cannot_be_put_back_is_left_alone(late, monkeypatch):
    functions._kernels_scale.cache_clear()
    before = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.delattr(torch.late, "get_rng_state")
        assert dropout_again(torch.ones(8, device=DEVICE), 0.15) is None
        assert torch.equal(torch.get_rng_state(), before)
    assert dropout_again(torch.ones(8, device=DEVICE), 0.15) is not None


class _NoSumsInAnyOrder(TorchDispatchMode):
    """Refuses what CUDA refuses where algorithms have to be deterministic."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep_winners", [True, False])
def test_rows_are_those_of_a_cpu_and_drawn_in_a_deterministic_way(late, keep_winners):
    generator = torch.Generator().manual_seed(0)
    importance = torch.rand(997, generator=generator).pow(4)
    random = torch.rand(200, generator=generator, dtype=torch.double)
    expected = draw_rows(importance, random, keep_winners=keep_winners)
    with _NoSumsInAnyOrder():
        found = draw_rows(importance.to("late:0"), random.to("late:0"), keep_winners=keep_winners)
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-12, atol=0)
