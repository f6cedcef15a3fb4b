"""Every optimizer and module of torch, with the inputs of torch's own tests, in memory and offloaded, compared bit by bit.

An optimizer trains a small model for a few steps: losses, weights and state. Of a module: results, buffers, first
derivatives, and derivatives of these. Weights leave memory after each use, and backward reads what it needs from the drive.
"""

import contextlib
import copy
import functools
import itertools
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_offload import OffloadConfig, OffloadConfigError, OffloadSession, attach
from tests.helpers.controlled_tier import wait_for_stores
from tests.helpers.parked import parked
from tests.operators.catalogue import seed
from tests.operators.probes import bits

Attach = Callable[[nn.Module, Path], OffloadSession]
Run = Callable[[Attach | None, Path], Any]


KINDS = ("same bits", "refused by name", "raises in memory, too", "differs")


def compare(table: Iterable[tuple[str, Run]], arms: dict[str, Attach]) -> dict[str, "Counter[str]"]:
    """Run each case without offloading and in every arm. Returns how many cases of each arm came to the same."""
    found: dict[str, Counter[str]] = {arm: Counter() for arm in arms}
    with tempfile.TemporaryDirectory(prefix="hf_offload-tables-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in table:
            plain = _outcome(run, None, Path(folder))
            for arm, put in arms.items():
                found[arm][_compared(name, plain, _outcome(run, put, Path(folder)))] += 1
    return found


def _compared(name: str, plain: Any, found: Any) -> str:
    if isinstance(plain, Exception) and isinstance(found, Exception):
        return f"raises in memory, too: {_text(plain)[:60]}"
    if isinstance(found, OffloadConfigError) or "cannot be streamed" in str(found)[:100]:
        return f"refused by name: {' '.join(str(found).split()[:12])}"
    if not isinstance(plain, Exception) and found == plain:
        return "same bits"
    return f"differs: {name}: {_text(found)}; without offloading: {_text(plain)}"


def _outcome(run: Run, put: Attach | None, folder: Path) -> Any:
    try:
        return run(put, folder)
    except Exception as error:  # of torch's inputs, some are not for training
        return error.with_traceback(None)


def _text(found: Any) -> str:
    is_error = isinstance(found, Exception)
    return f"{type(found).__name__}: {(str(found).splitlines() or [''])[0]}" if is_error else "other values"


@contextlib.contextmanager
def _attached(put: Attach | None, model: nn.Module, folder: Path) -> Iterator[OffloadSession | None]:
    session = put(model, folder) if put else None
    try:
        yield session
    finally:
        if session:
            session.detach()


OPTIMIZER_ARMS: dict[str, Attach] = {
    "state": lambda model, folder: attach(
        model, OffloadConfig(tier="none", optimizer="ssd", min_bytes=0, directory=folder)
    ),
    "state and weights": lambda model, folder: parked(model, folder, optimizer="ssd"),
}


def optimizers() -> Iterator[tuple[str, Run]]:
    """Each of torch's entries, in each implementation that runs on a CPU, and each dtype."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        ways = {way: {way: True} for way in ("foreach", "fused") if way in info.supported_impls}
        ways["for-loop"] = {"foreach": False} if ways else {}
        dtypes = [torch.float32, torch.float64, torch.bfloat16] + [torch.complex64] * info.supports_complex
        sparse = [True] if info.only_supports_sparse_grads else [False, True] if info.supports_sparse else [False]
        entries = info.optim_inputs_func(device="cpu")
        for entry, way, dtype, is_sparse in itertools.product(entries, ways, dtypes, sparse):
            if is_sparse and dtype.is_complex:
                continue  # an embedding has no complex gradient
            if way == "fused" and dtype is torch.bfloat16 and entry.kwargs.get("momentum"):
                continue  # SGD's reads memory that it has not written: in memory, too, no two runs are the same
            name = f"{info.name} {way} {dtype} {'sparse ' if is_sparse else ''}({entry.desc})"
            yield name, functools.partial(_train, info, entry.kwargs | ways[way], dtype, is_sparse)


def _train(
    info: Any, options: dict[str, Any], dtype: torch.dtype, is_sparse: bool, put: Attach | None, folder: Path
) -> Any:
    seed(0)
    if is_sparse:
        model = nn.Sequential(nn.Embedding(9, 12, sparse=True)).to(dtype)
    else:
        model = nn.Sequential(*[nn.Linear(12, 12, bias=info.name != "Muon") for _ in range(3)]).to(dtype)
    inputs = torch.randint(9, (4, 5)) if is_sparse else torch.randn(5, 12, dtype=dtype)
    logged = []
    with _attached(put, model, folder) as session:
        optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(options))
        if session:
            optimizer = session.prepare_optimizer(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(inputs).abs().square().mean()
            loss.backward()
            return loss

        for step in range(4):
            if step == 2:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
            if info.step_requires_closure:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            logged.append(bits(loss))
            if session:
                session.end_step()
        return tree_map_only(Tensor, bits, [logged, model.state_dict(), optimizer.state_dict()])


MOST_INPUTS = 32
"""Of one module, dtype and mode: some have hundreds, of which every so many is taken."""

READ_BACK: dict[str, Any] = {"tier": "ssd", "min_bytes": 0, "read_ahead_bytes": 0}
MODULE_ARMS: dict[str, Attach] = {
    "activations": lambda model, folder: attach(model, OffloadConfig(directory=folder, **READ_BACK)),
    "activations and weights": lambda model, folder: parked(model, folder, **READ_BACK),
}


def modules() -> Iterator[tuple[str, Run]]:
    """Each of torch's entries, in each dtype, and in training and evaluation where they differ."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for dtype, training in itertools.product(info.dtypes, [True, False][: 1 + info.train_and_eval_differ]):
            seed(0)
            made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
            samples = list(enumerate(made))
            for number, sample in samples[:: -(-len(samples) // MOST_INPUTS)]:
                name = f"{info.name} {dtype} {'training' if training else 'evaluation'} {number} ({sample.desc})"
                yield name, functools.partial(_derivatives, info, sample, dtype, training)


def _derivatives(info: Any, sample: Any, dtype: torch.dtype, training: bool, put: Attach | None, folder: Path) -> Any:
    seed(0)
    given = sample.constructor_input
    module = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
    forward = sample.forward_input
    if info.is_lazy:
        with torch.no_grad():
            module(*copy.deepcopy(forward.args), **copy.deepcopy(forward.kwargs))
    leaves: list[Tensor] = []

    def fresh(tensor: Tensor) -> Tensor:
        plain = tensor.detach().clone()
        if not tensor.requires_grad:
            return plain
        leaves.append(plain.requires_grad_())
        return plain.clone()  # dies with the forward: backward gets what was stored, not what is still there

    whole = nn.ModuleList([module, nn.Linear(1, 1)])  # offloading is for models that have a parameter
    with (
        nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),  # the others have no second derivative
        _attached(put, whole, folder) as session,
        session.scope() if session else contextlib.nullcontext(),
    ):
        args, kwargs = tree_map_only(Tensor, fresh, (forward.args, forward.kwargs))
        results = [one for one in tree_leaves(module(*args, **kwargs)) if isinstance(one, Tensor)]
        del args, kwargs
        found = [bits(one) for one in results]
        leaves += [one for one in module.parameters() if one.requires_grad]
        results = [one * 1 for one in results if one.requires_grad]
        for order in range(1 + info.supports_gradgrad):
            if not results or not leaves:
                break
            if session:
                wait_for_stores(session._engine.transfer)
            weights = [torch.randn_like(one.detach()) for one in results]
            again = order < info.supports_gradgrad
            try:
                grads = torch.autograd.grad(results, leaves, weights, create_graph=again, allow_unused=True)
            except RuntimeError as error:
                if "is not implemented" not in str(error):
                    raise
                found.append(str(error))  # it has no second derivative
                break
            found += [None if one is None else bits(one) for one in grads]
            results = [one * 1 for one in grads if one is not None and one.requires_grad]
            del grads
        return [found, [bits(one) for one in (*module.buffers(), *module.parameters())]]


def tables(only: str | None = None) -> dict[str, dict[str, "Counter[str]"]]:
    """Both tables in their arms, or those whose names have ``only`` in them."""
    made = {"torch optimizers": (optimizers, OPTIMIZER_ARMS), "torch modules": (modules, MODULE_ARMS)}
    return {name: compare(cases(), arms) for name, (cases, arms) in made.items() if only is None or only in name}


def report(found: dict[str, dict[str, "Counter[str]"]]) -> Table:
    table = Table("table", "offloaded", *KINDS, title="torch's own tables, in memory and offloaded")
    for name, arms in found.items():
        for arm, counts in arms.items():
            sums = (sum(n for text, n in counts.items() if text.startswith(kind)) for kind in KINDS)
            table.add_row(name, arm, *map(str, sums))
    return table
