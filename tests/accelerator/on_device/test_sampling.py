"""Estimates from a part of the input on an accelerator, where sums must not depend on the order of threads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.transforms.sampling.linear import draw_rows


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
