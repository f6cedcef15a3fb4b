"""Modules that use their weights in every way, for random models; each maps ``(BATCH, WIDTH)`` to the same."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BATCH, WIDTH = 3, 8


class Stumbled(Exception):
    """An error of the user's own."""


class Block(nn.Module):
    """A square weight and a bias, and the name of a function of :data:`COMPUTE`."""

    def __init__(self, compute: str, weight: Tensor | None = None):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4 if weight is None else weight)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return COMPUTE[self.compute](self, inputs)


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ inputs


class SavesView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight.t(), weight[:1])
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, turned, first = ctx.saved_tensors
        return gradients[0] @ turned.t() + 0 * first, gradients[0].t() @ inputs


class KeepsWeight(torch.autograd.Function):
    """As an attribute, which no hook of autograd sees."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.inputs, ctx.weight = inputs.detach(), weight
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.inputs


class ChangesWeight(torch.autograd.Function):
    """In place, in its forward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        weight.data.mul_(0.9)
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ inputs


class Breaks(torch.autograd.Function):
    """In backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Stumbled


class Unusual(nn.Module):
    """A parameter of an unusual form, and the name of a function of :data:`UNUSUAL`."""

    def __init__(self, parameter: nn.Parameter, compute: str):
        super().__init__()
        self.own = parameter
        self.compute = compute

    def forward(self, inputs: Tensor) -> Tensor:
        return UNUSUAL[self.compute](inputs, self.own)


class Looks(nn.Module):
    """Rows of an embedding, whose numbers come from the inputs."""

    def __init__(self, kind: type[nn.Module], **options: Any):
        super().__init__()
        self.embedding = kind(11, WIDTH, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        numbers = inputs.detach().float().nan_to_num().mul(7).long().remainder(11)
        if isinstance(self.embedding, nn.EmbeddingBag):
            return inputs + self.embedding(numbers)
        return inputs + self.embedding(numbers[:, 0])


class Rows(nn.Module):
    """Gives its module the inputs as one sequence, as :data:`CALLS` says, and takes what comes first."""

    def __init__(self, inner: nn.Module, calls: str = "once"):
        super().__init__()
        self.inner = inner
        self.calls = calls

    def forward(self, inputs: Tensor) -> Tensor:
        result = CALLS[self.calls](self.inner, inputs.unsqueeze(0))
        return (result[0] if isinstance(result, tuple) else result).squeeze(0)


class Wrapped(nn.Module):
    """Its module within something: a checkpoint, autocast, no gradients."""

    def __init__(self, inner: nn.Module, how: str):
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how in ("checkpoint", "reentrant"):
            return checkpoint(self.inner, inputs, use_reentrant=self.how == "reentrant")
        if self.how == "twice":
            return self.inner(self.inner(inputs))
        if self.how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(inputs).to(inputs.dtype)
        if self.how == "no_grad":
            with torch.no_grad():
                return inputs + self.inner(inputs)
        if self.how == "called":
            changed = {name: value * 1.5 for name, value in self.inner.named_parameters() if value.is_floating_point()}
            return torch.func.functional_call(self.inner, changed, (inputs,))
        return inputs + self.inner(inputs)


def _clamp(block: Block, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        block.weight.clamp_(-0.5, 0.5)
    return F.linear(inputs, block.weight, block.bias)


def _kept_view(block: Block, inputs: Tensor) -> Tensor:
    """A view of a former call is used again, and then replaced."""
    view = block.__dict__.setdefault("view", block.weight.detach().t())
    result = inputs @ view + block.bias
    block.__dict__["view"] = block.weight.detach().t()
    return result


def _view_while_it_changes(block: Block, inputs: Tensor) -> Tensor:
    view = block.weight.detach().view(-1)
    hidden = F.linear(inputs, block.weight)
    view[0] += 0.01
    return hidden + block.weight.sum()


def _splits(block: Block, inputs: Tensor) -> Tensor:
    one, other = block.weight.chunk(2)
    return torch.cat([F.linear(inputs, one), F.linear(inputs, other, block.bias[WIDTH // 2 :])], -1)


def _by_storage(block: Block, inputs: Tensor) -> Tensor:
    alias = torch.empty(0, dtype=block.weight.dtype).set_(block.weight.untyped_storage())
    return inputs * alias.sum() + F.linear(inputs, block.weight)


def _numpy(block: Block, inputs: Tensor) -> Tensor:
    array = block.bias.detach().float().numpy()
    return F.linear(inputs, block.weight) + torch.from_numpy(array.copy()).to(inputs.dtype)


def _graph_in_place(block: Block, inputs: Tensor) -> Tensor:
    weight = block.weight.clone()
    weight[0] = block.bias
    return F.linear(inputs, weight.mul_(0.5))


def _foreach(block: Block, inputs: Tensor) -> Tensor:
    one, other = torch._foreach_mul([block.weight, block.bias], 0.5)
    return F.linear(inputs, one, other)


def _batched(block: Block, inputs: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.mv(block.weight, row) + block.bias)(inputs)


COMPUTE: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "linear": lambda block, inputs: F.linear(inputs, block.weight, block.bias),
    "turned": lambda block, inputs: inputs @ block.weight.t() + block.bias,
    "einsum": lambda block, inputs: torch.einsum("bi,oi->bo", inputs, block.weight),
    "addmm": lambda block, inputs: torch.addmm(block.bias, inputs, block.weight.T),
    "out of place": lambda block, inputs: inputs.clone().mul_(block.bias).add_(block.bias) @ block.weight,
    "twice": lambda block, inputs: F.linear(F.linear(inputs, block.weight).tanh(), block.weight.t(), block.bias),
    "rows": lambda block, inputs: F.linear(inputs, block.weight[:, 1:].flip(0)[:, :1].expand(-1, WIDTH)) + block.bias,
    "row by row": lambda block, inputs: torch.stack([(inputs * row).sum(-1) for row in block.weight], -1),
    "unbound": lambda block, inputs: torch.stack([inputs @ row for row in block.weight.unbind()], -1),
    "normed": lambda block, inputs: F.linear(inputs, block.weight / block.weight.norm(dim=1, keepdim=True)),
    "layer norm": lambda block, inputs: F.layer_norm(inputs, (WIDTH,), block.bias, block.weight[0]),
    "gated": lambda block, inputs: inputs * torch.sigmoid(block.weight.diagonal() + block.bias),
    "saves weight": lambda block, inputs: SavesWeight.apply(inputs, block.weight) + block.bias,
    "saves view": lambda block, inputs: SavesView.apply(inputs, block.weight),
    "saves view of view": lambda block, inputs: SavesView.apply(inputs, block.weight.t()),
    "keeps weight": lambda block, inputs: KeepsWeight.apply(inputs, block.weight),
    "changes weight": lambda block, inputs: ChangesWeight.apply(inputs, block.weight),
    "clamp": _clamp,
    "kept view": _kept_view,
    "view while it changes": _view_while_it_changes,
    "splits": _splits,
    "by storage": _by_storage,
    "numpy": _numpy,
    "in place": _graph_in_place,
    "foreach": _foreach,
    "vmap": _batched,
    "detached": lambda block, inputs: F.linear(inputs, block.weight.detach(), block.bias),
    "data": lambda block, inputs: F.linear(inputs, block.weight.data) + block.bias,
    "constants": lambda block, inputs: inputs * torch.tensor(block.bias.detach().tolist()).to(inputs.dtype),
    "where": lambda block, inputs: torch.where(inputs > 0, inputs @ block.weight, block.bias),
    "compared": lambda block, inputs: inputs * (2 if bool((block.weight.sum() > 0).item()) else 1) * block.bias,
    "bilinear": lambda block, inputs: F.bilinear(inputs, inputs, block.weight.unsqueeze(1).expand(-1, WIDTH, -1)),
    "recomputed": lambda block, inputs: checkpoint(F.linear, inputs, block.weight, block.bias, use_reentrant=False),
    "reentrant": lambda block, inputs: checkpoint(F.linear, inputs, block.weight, block.bias, use_reentrant=True),
    "nothing": lambda block, inputs: inputs * 1,
}
UNUSUAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "complex": lambda x, own: (x.float() * own.conj() + own).abs().to(x.dtype),
    "numbers": lambda x, own: x.index_select(-1, own),
    "matrix": lambda x, own: F.linear(x, own) * 0.1,
    "empty": lambda x, own: x + F.linear(x, own).sum(),
    "scale": lambda x, own: x * own + own.item(),
    "vector": lambda x, own: x * own,
}
CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "once": lambda module, x: module(x),
    "itself": lambda module, x: module(x, x, x),
    "without weights": "without weights",
    "image": lambda module, x: module(x.reshape(-1, 2, 2, WIDTH // 4)).reshape(x.shape),
    "turned": lambda module, x: module(x.mT).mT,
}


def _complex() -> nn.Module:
    parameter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
    return Unusual(parameter, "complex")


def _numbers() -> nn.Module:
    parameter = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
    return Unusual(parameter, "numbers")


def _strided() -> nn.Module:
    parameter = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
    return Unusual(parameter, "matrix")


def _expanded() -> nn.Module:
    parameter = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH), requires_grad=False)
    return Unusual(parameter, "matrix")


def _empty() -> nn.Module:
    return Unusual(nn.Parameter(torch.empty(0, WIDTH)), "empty")


def _scale() -> nn.Module:
    return Unusual(nn.Parameter(torch.tensor(1.25)), "scale")


def _shifted() -> nn.Module:
    parameter = nn.Parameter(torch.randn(3 * WIDTH)[WIDTH : 2 * WIDTH])
    return Unusual(parameter, "vector")


def _image() -> nn.Module:
    inner = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
    return Rows(inner, "image")


def _shared_memory() -> nn.Module:
    """Two parameters, and a buffer, of one memory."""
    flat = torch.randn(2 * WIDTH * WIDTH) * 0.4
    one, other = Block("linear"), Block("turned")
    one.weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    other.weight = nn.Parameter(flat[WIDTH * WIDTH // 2 : WIDTH * WIDTH * 3 // 2].view(WIDTH, WIDTH))
    return nn.Sequential(one, other)


def _aliases() -> nn.Module:
    one, other = Block("linear"), Block("turned")
    other.weight = nn.Parameter(one.weight.data)
    return nn.Sequential(one, other)


def _tied() -> nn.Module:
    one, other = Block("linear"), Block("turned")
    other.weight, other.bias = one.weight, one.bias
    return nn.Sequential(one, nn.Tanh(), other)


def _tied_embedding() -> nn.Module:
    looks = Looks(nn.Embedding)
    last = nn.Linear(WIDTH, 11, bias=False)
    last.weight = looks.embedding.weight
    return nn.Sequential(looks, last, nn.Linear(11, WIDTH))


_layer = functools.partial(nn.TransformerEncoderLayer, WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Block, name) for name in COMPUTE},
    "nn.Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "turned weight": lambda: Block("linear", torch.randn(WIDTH, WIDTH).t() * 0.4),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "prelu": lambda: nn.PReLU(),
    "complex": _complex,
    "numbers": _numbers,
    "strided": _strided,
    "expanded": _expanded,
    "empty": _empty,
    "scale": _scale,
    "shifted": _shifted,
    "image": _image,
    "shared memory": _shared_memory,
    "aliases": _aliases,
    "tied": _tied,
    "tied embedding": _tied_embedding,
    "embedding": lambda: Looks(nn.Embedding),
    "embedding with a norm": lambda: Looks(nn.Embedding, max_norm=0.7),
    "bag": lambda: Looks(nn.EmbeddingBag, mode="sum", max_norm=0.9),
    "lstm": lambda: Rows(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "gru": lambda: Rows(nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)),
    "cell": lambda: nn.GRUCell(WIDTH, WIDTH),
    "attention": lambda: Rows(nn.MultiheadAttention(WIDTH, 2, batch_first=True), "itself"),
    "attention without weights": lambda: Rows(nn.MultiheadAttention(WIDTH, 2, batch_first=True), "without weights"),
    "encoder": lambda: Rows(nn.TransformerEncoder(_layer(), 2)),
    "encoder layer": lambda: Rows(_layer(norm_first=True)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "convolution": lambda: Rows(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), "turned"),
}
WRAPPINGS = ("plain", "residual", "checkpoint", "reentrant", "autocast", "no_grad", "twice", "called")
