"""Bit by bit on a real GPU: bytes there and back, a model of transformers, and what is drawn or made again."""

import os
from typing import Any

# Read once, when cuBLAS is first used; without it nothing that multiplies matrices is deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, RecomputeElementwiseConfig, attach
from hf_offload.engine.recompute import Recompute
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.rematerialization.functions import dropout_again, packed_dropout
from hf_offload.transforms.sampling.linear import draw_rows
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model, weights

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
LAYOUTS = {
    "contiguous": lambda whole: whole,
    "transposed": lambda whole: whole.t(),
    "every other column": lambda whole: whole[:, ::2],
    "an odd beginning": lambda whole: whole.view(-1)[3:],
    "expanded": lambda whole: whole[:, :1].expand(-1, 64),
}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of what is no number, and of zeros below zero."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


# -------------------------------------------------------------------------------------------------------------- bytes


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, saved: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.found = found
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.found.append(ctx.saved_tensors[0])
        return gradient, None, None


class _Saver(nn.Module):
    """Saves tensors of any bytes that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device=DEVICE))

    def forward(self, made: list[Any], found: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.weight * 1
        for make in made:
            result = _Saved.apply(result, make(), found)
        return result.sum()


def any_bytes(dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    width = 128 * (1 if dtype is torch.bool else dtype.itemsize)
    drawn = torch.randint(2 if dtype is torch.bool else 256, (96, width), dtype=torch.uint8, generator=draw)
    return drawn.view(dtype).to(DEVICE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_every_byte_comes_back(tier, layout, tmp_path):
    directory = str(tmp_path) if tier == "ssd" else None
    config = OffloadConfig(tier=tier, directory=directory, min_bytes=0, read_ahead_bytes=0)
    model = _Saver()
    session = attach(model, config)
    made = [lambda dtype=dtype, seed=seed: LAYOUTS[layout](any_bytes(dtype, seed)) for seed, dtype in enumerate(DTYPES)]
    for _ in range(3):
        found: list[torch.Tensor] = []
        loss = model(made, found)
        session.settle()
        loss.backward()
        session.end_step()
        for make, one in zip(reversed(made), found, strict=True):
            expected = make()
            assert one.device == DEVICE
            assert one.stride() == expected.stride()
            assert same_bits(one, expected), one.dtype
    assert session.stats.total.loaded_bytes > 0
    assert session.stats.total.refused_bytes == 0
    session.detach()


# ----------------------------------------------------------------------------------------------------------- training


def trained(config: OffloadConfig | None) -> tuple[dict[str, torch.Tensor], int]:
    """Losses, gradients and weights of a few steps, and the bytes that were read back."""
    model = tiny_model("llama").to(DEVICE).train()
    session = None if config is None else attach(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    trace: dict[str, torch.Tensor] = {}
    for step in range(6):
        batch = {name: value.to(DEVICE) for name, value in tiny_batch("llama", seed=step).items()}
        loss = model(**batch).loss
        loss.backward()
        trace[f"step {step}: loss"] = loss.detach().cpu()
        trace |= {f"step {step}: gradient of {name}": value.cpu() for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.end_step()
    trace |= {f"weight {name}": value.cpu() for name, value in weights(model).items()}
    loaded = 0 if session is None else session.stats.total.loaded_bytes
    if session is not None:
        session.detach()
    return trace, loaded


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("tier", ["ram", "ssd", "auto"])
def test_a_llama_is_trained_to_the_same_bits(tier, tmp_path):
    expected, again = trained(None)[0], trained(None)[0]
    assert all(same_bits(value, again[what]) for what, value in expected.items()), (
        "a difference would not be the engine's"
    )
    settings: dict[str, Any] = {"ram": {"ram_budget": 1 << 30}, "ssd": {"directory": str(tmp_path)}}.get(
        tier, {"directory": str(tmp_path), "ram_budget": 1 << 30, "memory_budget": 1 << 30}
    )
    found, loaded = trained(OffloadConfig(tier=tier, min_bytes=0, **settings))
    assert [what for what, value in expected.items() if not same_bits(value, found[what])] == []
    assert loaded > 0


# --------------------------------------------------------------------------------------------------------------- lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropout_is_made_again_to_the_last_bit(dtype):
    """CUDA's kernel (native/cuda/Dropout.cu) takes ``1 - p`` in the dtype it adds up in, 32 bits for all but float64, and
    multiplies by the reciprocal of that. Its backward is given ``1 / (1 - p)`` in 64 bits and rounds that. For p = 0.15 the
    two differ by one unit in the last place, so what backward does is not what forward did.
    """
    values = torch.randn(1 << 18, device=DEVICE).to(dtype)
    for percent in range(1, 100):
        probability = percent / 100
        before = torch.cuda.get_rng_state(DEVICE), torch.get_rng_state()
        again = dropout_again(values, probability)
        after = torch.cuda.get_rng_state(DEVICE), torch.get_rng_state()
        assert all(map(torch.equal, before, after)), probability
        assert again is not None, probability
        torch.manual_seed(percent)
        expected = nn.functional.dropout(values, probability)
        torch.manual_seed(percent)
        result, bits = packed_dropout(values, probability)
        assert same_bits(result, expected), probability
        assert same_bits(again(values, bits), expected), probability


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("probability", [0.1, 0.15, 0.3])
def test_a_lean_model_has_the_gradients_of_the_usual_one(probability):
    """Its linear layers save what their inputs are made of, dropout among it."""
    found = []
    for config in (None, RecomputeElementwiseConfig(("activations", "norms", "dropout"))):
        model = tiny_model("gpt2", dropout=probability).to(DEVICE).train()
        lean = Rematerialization(model, config)
        lean.apply()
        torch.manual_seed(3)
        model(**{name: value.to(DEVICE) for name, value in tiny_batch("gpt2").items()}).loss.backward()
        found.append(gradients(model))
    assert [name for name, value in found[0].items() if not same_bits(value, found[1][name])] == []


@pytest.mark.usefixtures("deterministic")
def test_a_recomputed_block_whose_tensors_come_by_keyword_draws_the_same_dropout():
    """Of those alone, PyTorch's checkpointing puts no generator of the device back."""
    found = []
    for is_recomputed in (False, True):
        model = tiny_model("gpt2", dropout=0.1).to(DEVICE).train()
        block = model.transformer.h[0]
        if is_recomputed:
            Recompute({"block": block}).apply(["block"])
        torch.manual_seed(3)
        block(hidden_states=torch.ones(2, 24, 32, device=DEVICE)).square().sum().backward()
        found.append(gradients(model))
    assert [name for name, value in found[0].items() if not same_bits(value, found[1][name])] == []


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("keep_winners", [True, False])
def test_rows_are_drawn_where_algorithms_have_to_be_deterministic(keep_winners):
    """CUDA's cumsum of floating-point numbers adds up in an order that changes, and raises where that is not wanted; that of
    whole numbers has no order. Sums of 32-bit importances differ from a CPU's, so rows at the border of two may differ.
    """
    generator = torch.Generator().manual_seed(0)
    importance = torch.rand(4096, generator=generator).pow(4)
    random = torch.rand(800, generator=generator, dtype=torch.double)
    expected = draw_rows(importance, random, keep_winners=keep_winners)
    found = [draw_rows(importance.to(DEVICE), random.to(DEVICE), keep_winners=keep_winners) for _ in range(2)]
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))
    assert (found[0][0].cpu() == expected[0]).double().mean() > 0.99
    torch.testing.assert_close(found[0][1].sum().cpu(), expected[1].sum(), rtol=0.01, atol=0)
