"""Every differentiable operator of torch, as calls that can be repeated: torch's own list, and what is missing from it."""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint


def seed(number: int) -> None:
    """:func:`torch.manual_seed` for the CPU alone: for other devices it formats the stack, each time."""
    torch.default_generator.manual_seed(number)


@dataclasses.dataclass(frozen=True)
class Call:
    """``function(*fresh(arguments), **fresh(keywords))``."""

    operator: str
    variant: str
    function: Callable[..., Any]
    arguments: Any
    keywords: Any
    autocast: bool = False
    part: Callable[[Any], Any] = lambda results: results
    """What of its results has a gradient: of eigenvectors, only functions that do not depend on their signs."""

    def __str__(self) -> str:
        shapes = [tuple(one.shape) for one in tree_leaves((self.arguments, self.keywords)) if isinstance(one, Tensor)]
        return f"{self.operator} ({self.variant}) of {shapes}"

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Its results, and the leaves its tensors were made from. Those tensors are gone, and the results are not saved."""
        leaves: list[Tensor] = []

        def fresh(tensor: Tensor) -> Tensor:
            plain = tensor.detach().clone()
            if not tensor.requires_grad:
                return plain
            leaves.append(plain.requires_grad_())
            if self.variant == "strided" and plain.layout is torch.strided:
                return torch.stack([plain, plain], -1)[..., 0]
            made = plain.clone()  # dies with the forward: backward gets what was stored, not what is still there
            return made.conj() if self.variant == "conjugated" and made.is_complex() else made

        seed(0)
        arguments, keywords = tree_map_only(Tensor, fresh, (self.arguments, self.keywords))
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            results = tree_leaves(self.part(self.function(*arguments, **keywords)))
        results = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
        # An operator that saves its result lets go of it here; a product with a number saves nothing.
        return [(one if one.layout is torch.strided else one.to_dense()) * 1 for one in results], leaves


def differentiable(names: Iterable[str] | None = None) -> list[Any]:
    """torch's own descriptions (``OpInfo``) of its operators that have a derivative."""
    with warnings.catch_warnings():  # the module of torch's tests imports what it finds, deprecated or not
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [one for one in op_db if one.supports_autograd and (names is None or one.name in names)]


def calls_of(operator: Any, samples: int | None = None, variants: Iterable[str] | None = None) -> Iterator[Call]:
    """Calls of one operator: ``samples`` of torch's, in the ``variants`` it has.

    ``"usual"``, ``"in place"``, ``"complex"`` numbers, ``"conjugated"`` (a lazy conjugate), ``"strided"`` (not contiguous),
    and ``"autocast"`` to bfloat16.
    """
    dtypes = operator.supported_backward_dtypes("cpu")
    real = next((one for one in (torch.float, torch.double, torch.bfloat16) if one in dtypes), None)
    number = next((one for one in (torch.cfloat, torch.cdouble) if one in dtypes), None)
    kinds = {
        "usual": (real or number, operator.get_op()),
        "in place": (real or number, operator.get_inplace()),
        "complex": (number if real else None, operator.get_op()),
        "conjugated": (number, operator.get_op()),
        "strided": (real or number, operator.get_op()),
        "autocast": (real, operator.get_op()),
    }
    for variant, (dtype, function) in kinds.items():
        if dtype is None or function is None or (variants is not None and variant not in variants):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse samples are made of what is in beta
            seed(0)
            # Not sample_inputs(), which looks all frames of the stack through for the name of the test.
            made = operator.sample_inputs_func(operator, "cpu", dtype, requires_grad=True)
            found = list(itertools.islice(made, samples))
        for sample in found:
            arguments, autocast = (sample.input, *sample.args), variant == "autocast"
            name, part = operator.formatted_name, sample.output_process_fn_grad
            yield Call(name, variant, function, arguments, sample.kwargs, autocast, part)


def enlarged(call: Call, nbytes: int) -> Iterator[Call]:
    """The call with so many rows that its largest tensor has ``nbytes``: in all tensors, and in the first alone.

    Not every operator takes that, and some need too much memory for it.
    """
    tensors = [one for one in tree_leaves((call.arguments, call.keywords)) if _has_rows(one)]
    if not tensors:
        return
    times = -(-nbytes // max(one.nbytes for one in tensors))
    for which in (tensors, tensors[:1]):
        ids = {id(one) for one in which}

        def repeated(tensor: Tensor, ids: set[int] = ids) -> Tensor:
            if id(tensor) not in ids:
                return tensor
            return tensor.detach().repeat(times, *[1] * (tensor.dim() - 1)).requires_grad_(tensor.requires_grad)

        arguments, keywords = tree_map_only(Tensor, repeated, (call.arguments, call.keywords))
        yield dataclasses.replace(call, arguments=arguments, keywords=keywords)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.dim() > 0 and value.numel() > 0


# ------------------------------------------------------------------------------------------- what torch's list does not have


def others(rows: int = 6) -> Iterator[Call]:
    """Modules made of several operators, operators with random numbers or a state, and functions of the user's own."""
    for name, function, shapes in _functions():
        seed(0)
        inputs = [torch.randn(*(rows if length == "rows" else length for length in shape)) for shape in shapes]
        inputs = [one.requires_grad_() for one in inputs]
        for autocast in (False, True):
            variant = "autocast" if autocast else "usual"
            yield Call(name, variant, function, tuple(inputs), {}, autocast)


def _functions() -> Iterator[tuple[str, Callable[..., Any], list[tuple[Any, ...]]]]:
    hidden = [("rows", 4, 32)]
    for training in (True, False):
        yield f"rrelu, training={training}", lambda one, t=training: F.rrelu(one, training=t), hidden
        yield f"rrelu_, training={training}", lambda one, t=training: F.rrelu_(one, training=t).sin(), hidden
        yield f"RReLU between layers, training={training}", _module(_rrelu_net, training), [("rows", 32)]
        yield f"batch_norm with statistics, training={training}", _batch_norm(training), [("rows", 32, 4)]
        for kind in (nn.RNN, nn.LSTM, nn.GRU):
            module = lambda kind=kind: kind(32, 48, num_layers=2, dropout=0.3, bidirectional=True)  # noqa: E731
            yield f"{kind.__name__}, training={training}", _module(module, training), hidden
    yield "rrelu_with_noise_functional", _functional_rrelu, hidden
    yield "instance_norm with statistics", _instance_norm, [("rows", 32, 8)]
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield cell.__name__, _module(lambda cell=cell: cell(32, 48)), [("rows", 32)]
    for dropout in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d):
        yield dropout.__name__, lambda one, d=dropout: d(one, 0.3, training=True), hidden
        yield f"{dropout.__name__} in place", lambda one, d=dropout: d(one * 1, 0.3, True, True), hidden
    yield "native_dropout", lambda one: torch.native_dropout(one, 0.3, True), hidden
    yield "gumbel_softmax", lambda one: F.gumbel_softmax(one), hidden
    for backend in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        for causal in (False, True):
            name = f"scaled_dot_product_attention, {backend.name}, causal={causal}"
            yield name, _attention(backend, causal, 0.0), [(2, 4, "rows", 16)] * 3
    math = torch.nn.attention.SDPBackend.MATH
    yield "scaled_dot_product_attention, dropout", _attention(math, True, 0.2), [(2, 4, "rows", 16)] * 3
    yield "MultiheadAttention", _module(lambda: nn.MultiheadAttention(32, 4, dropout=0.2), calls=3), hidden
    yield "TransformerEncoderLayer", _module(lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.2)), hidden
    yield "ctc_loss", _ctc_loss, [("rows", 4, 16)]
    for mode in ("sum", "mean", "max"):
        yield f"embedding_bag {mode}", _bag(mode), [("rows", 32)]
    yield (
        "embedding with max_norm",
        lambda table: F.embedding(torch.arange(6) % 3, table * 1, max_norm=0.5),
        [("rows", 32)],
    )
    yield "max_pool with indices", lambda one: F.max_pool1d(one, 2, return_indices=True), [("rows", 32, 8)]
    yield "fractional_max_pool", lambda one: F.fractional_max_pool2d(one, 3, output_size=(4, 4)), [(2, "rows", 12, 12)]
    yield "checkpoint", lambda one: checkpoint(_chain, one, use_reentrant=False), hidden
    yield "checkpoint, reentrant", lambda one: checkpoint(_chain, one, use_reentrant=True), hidden
    yield "a function of one's own", _Cubed.apply, hidden
    yield "a function that writes to its input", lambda one: _Doubled.apply(one * 1).sin(), hidden
    yield "operations in place, one after the other", _in_place_chain, hidden
    yield "parts of a storage", _parts, [("rows", 96)]
    yield (
        "lists of tensors",
        lambda *all_of_it: torch._foreach_mul(list(all_of_it), list(reversed(all_of_it))),
        hidden * 3,
    )
    yield "lists of tensors in place", _foreach_in_place, hidden * 3
    yield "weight_norm", lambda v, g: torch._weight_norm(v, g, 0), [("rows", 32), ("rows", 1)]
    yield "complex numbers", lambda a, b: torch.fft.fft(torch.complex(a, b)).abs(), hidden * 2


def _module(make: Callable[[], nn.Module], training: bool = True, calls: int = 1) -> Callable[[Tensor], Any]:
    # Weights are made in every run: the draws are the same, and nobody holds them afterwards.
    def run(inputs: Tensor) -> Any:
        module = make().train(training)
        return module(*[inputs] * calls)

    return run


def _rrelu_net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.RReLU(), nn.Linear(64, 64), nn.RReLU(inplace=True), nn.Linear(64, 8))


def _batch_norm(training: bool) -> Callable[[Tensor], Tensor]:
    def run(inputs: Tensor) -> Tensor:
        mean, variance = torch.zeros(32), torch.ones(32)
        once = F.batch_norm(inputs, mean, variance, training=training)
        return F.batch_norm(once.sin(), mean, variance, training=training)

    return run


def _instance_norm(inputs: Tensor) -> Tensor:
    return F.instance_norm(inputs, torch.zeros(32), torch.ones(32), use_input_stats=True)


def _functional_rrelu(inputs: Tensor) -> Any:
    return torch.ops.aten.rrelu_with_noise_functional(inputs, torch.empty_like(inputs), 0.1, 0.4, True)


def _attention(backend: Any, causal: bool, dropout: float) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal)

    return run


def _ctc_loss(inputs: Tensor) -> Tensor:
    targets = torch.arange(1, 9).view(4, 2)
    lengths = torch.full((4,), len(inputs)), torch.full((4,), 2)
    return F.ctc_loss(inputs.log_softmax(-1), targets, *lengths)


def _bag(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda table: F.embedding_bag(torch.arange(12) % 5, table, torch.tensor([0, 4, 9]), mode=mode)


def _chain(inputs: Tensor) -> Tensor:
    return F.rrelu(inputs.sin(), training=True).exp() * F.dropout(inputs, 0.3)


def _in_place_chain(inputs: Tensor) -> Tensor:
    value = inputs.sin().add_(1).sqrt().mul(2).add_(1).mul_(inputs.cos()).clamp_(-0.5, 2)
    return F.rrelu_(value.add_(inputs.detach()), training=True)


def _parts(inputs: Tensor) -> Tensor:
    one, two, three = inputs.mul(2).unsafe_chunk(3, 1)
    return (one.sigmoid_() * two.tanh_() * three.exp_()).sum(1)


def _foreach_in_place(*inputs: Tensor) -> Any:
    values = [one * 1 for one in inputs]
    torch._foreach_mul_(values, list(inputs))
    torch._foreach_exp_(values)
    return values


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        square = torch.empty_like(inputs)
        ctx.save_for_backward(square, inputs)
        torch.mul(inputs, inputs, out=square)  # saved above, which takes effect when forward has returned
        return square * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        square, inputs = ctx.saved_tensors
        return gradient * (square + 2 * inputs * inputs)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.mark_dirty(inputs)
        return inputs.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2
