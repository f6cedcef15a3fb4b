"""What may happen around the steps of a run with a budget: other threads, other modes, other inputs, changes in between."""

import concurrent.futures
import contextlib
import contextvars
import copy
import dataclasses
import functools
import logging
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, attach, offload_activations
from hf_offload.engine.recompute import Recompute
from hf_offload.errors import OffloadConfigError, OffloadPlanError, RecomputeError
from hf_offload.settings.sizes import format_bytes
from tests.helpers.train import copied
from tests.helpers.training_steps import end_step

WIDTH = 64


class Block(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.down(self.dropout(F.gelu(self.up(self.norm(hidden) * self.scale))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden, extra=None):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if extra is None else hidden * extra.to_dense().sum()


def net():
    torch.manual_seed(0)
    return Net()


def batch(rows=64):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    """Plans do not depend on how busy the machine is."""
    machine_with_drive(1e9)


def auto(tmp_path, budget="100MiB", elementwise="off"):
    """Without steps that are measured for recompute of elementwise operations, unless they are asked for."""
    return OffloadConfig(
        tier="auto", directory=tmp_path, memory_budget=budget, min_bytes=4096, recompute_elementwise=elementwise
    )


def train(model, steps=4, session=None, forward=None, rows=lambda step: 64):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        hidden = batch(rows(step))
        (model(hidden) if forward is None else forward(model, hidden, step)).square().mean().backward()
        end_step(optimizer, session)
    return copied(list(model.parameters()))


def is_same(one, other):
    return all(map(torch.equal, one, other))


def test_a_block_that_stays_as_it_is_is_recomputed():
    expected = train(net())
    model = net()
    recompute = Recompute({f"blocks.{index}": block for index, block in enumerate(model.blocks)})
    recompute.apply(["blocks.1", "blocks.2"])
    assert is_same(train(model), expected)
    recompute.remove()


def _with_a_sparse_input(model, hidden, step):
    return model(hidden, torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,), check_invariants=True))


def _with_computed_weights(model, hidden, step):
    weights = {name: 1.0 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, weights, (hidden,))


def _in_evaluation_mode(model, hidden, step):
    return model.eval()(hidden)


@pytest.mark.filterwarnings("error:The .grad attribute")
@pytest.mark.parametrize("forward", [_with_a_sparse_input, _with_computed_weights, _in_evaluation_mode])
def test_any_forward_of_a_model_is_planned(forward, tmp_path):
    expected = train(net(), forward=forward)
    model = net()
    with offload_activations(model, auto(tmp_path)) as session:
        assert is_same(train(model, session=session, forward=forward), expected)
        assert session.forecast is not None


def test_steps_may_run_in_another_thread_than_the_one_that_ends_them(tmp_path):
    expected = train(net())
    model = net()
    session = attach(model, auto(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        for step in range(4):
            executor.submit(_one_step, model, step).result()
            session.end_step()
    assert session.forecast is not None
    session.detach()
    assert is_same(list(model.parameters()), expected)


def _one_step(model, step):
    torch.manual_seed(step)
    model(batch()).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


def test_a_mode_of_the_users_is_left_as_it_was_entered(tmp_path):
    counts = []

    def forward(model, hidden, step):
        with FlopCounterMode(display=False) as counter:
            result = model(hidden)
        counts.append(counter.get_total_flops())
        return result

    model = net()
    session = attach(model, auto(tmp_path))
    train(model, session=session, forward=forward)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert len(set(counts)) == 1
    assert session.forecast is None  # never measured, so everything moves
    train(model, steps=1, session=session)
    assert session.forecast is not None
    session.detach()


COPIES = {"deep": copy.deepcopy, "pickled": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("bytes_per_s", [1e9, 1e5], ids=["moved", "recomputed"])
@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_the_model_are_taken_in_any_step_and_are_not_offloaded(
    copied, bytes_per_s, machine_with_drive, tmp_path
):
    def forward(model, hidden, step):
        output = model(hidden)
        with torch.random.fork_rng():
            clone = COPIES[copied](model)  # with whatever is attached to it, of a step that is measured for one
            clone(hidden).square().mean().backward()
        found.append([parameter.grad for parameter in clone.parameters()])
        return output

    found: list[list[torch.Tensor]] = []
    plain = train(net(), forward=forward, rows=lambda step: 256)
    expected, found = found, []
    machine_with_drive(bytes_per_s)
    model = net()
    session = attach(model, auto(tmp_path, "6MiB"))
    trained = train(model, session=session, forward=forward, rows=lambda step: 256)
    placed = session.plan.reason
    session.detach()
    assert is_same(plain, trained)
    assert all(map(is_same, expected, found))
    assert ("ssd" if bytes_per_s > 1e6 else "recompute") in placed


COMPILED = {
    "whole": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager") or model,
    "a block": lambda model: model.blocks[1].compile(backend="eager") or model,
}


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("compiled", COMPILED)
def test_a_model_that_is_compiled_after_all_is_refused_as_one_that_was_before(compiled, when, tmp_path):
    def forward(model, hidden, step):
        nonlocal called
        if step == when:
            called = COMPILED[compiled](model)
        return called(hidden)

    called = model = net()
    session = attach(model, auto(tmp_path))
    with pytest.raises(OffloadConfigError, match="compiled model"):
        train(model, session=session, forward=forward)
    session.detach()
    torch.compiler.reset()


def _wide(hidden):
    """64 times the memory for a moment."""
    return hidden.repeat(64, 1).view(64, *hidden.shape).sum(0)


HIGHER_ORDER = {
    "cond": lambda block, hidden: torch.cond(
        hidden.isfinite().all(), lambda x: _wide(block(x)), lambda x: -block(x), (hidden,)
    ),
    "map": lambda block, hidden: map_rows(lambda row: _wide(block(row[None])).squeeze(0), hidden),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's own, where it compiles
@pytest.mark.parametrize("operator", HIGHER_ORDER)
def test_what_higher_order_operators_run_is_measured(operator, tmp_path):
    """``torch.cond`` and the like, of which a dispatch mode has to say that it knows them."""

    def trained(**options):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model.forward = lambda hidden: HIGHER_ORDER[operator](model[1], model[0](hidden))
        with offload_activations(model, OffloadConfig(**options)) as session:
            return train(model, steps=3, session=session), session

    expected, _ = trained(tier="none")
    found, session = trained(tier="auto", directory=tmp_path, memory_budget="100MiB", min_bytes=1024)
    assert is_same(expected, found)
    assert session.stats.steps[0].offloaded_bytes > 0
    rows = 1 if operator == "map" else 64
    assert session.most_measured_bytes > 64 * rows * WIDTH * 4


def test_a_compiled_function_stays_compiled_in_a_measured_step(tmp_path):
    """It may have other bits than the function itself."""

    def doubled(graph, inputs):
        return lambda *args: [2 * one for one in graph.forward(*args)]

    def trained(config):
        torch.compiler.reset()
        model, function = net(), torch.compile(torch.sin, backend=doubled)
        model.forward = lambda hidden: model.blocks[0](function(hidden))
        with offload_activations(model, config) as session:
            return train(model, session=session)

    assert is_same(trained(OffloadConfig(tier="none")), trained(auto(tmp_path)))


def _gradient_penalty(model, hidden):
    hidden = hidden.clone().requires_grad_()
    loss = model(hidden).square().mean()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    (loss + gradient.square().sum()).backward()


def _in_pieces(model, hidden):
    *parts, last = model(hidden).chunk(4)
    for part in parts:
        part.square().mean().backward(retain_graph=True)
    last.square().mean().backward()


def _steps_of(backwards, config, prepares=False, look=lambda session: None):
    """The weights, bytes that each step moved, and the session, of steps with these backwards and a ``look`` after each."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = []
    with offload_activations(model, config) as session:
        if prepares:
            session.prepare_optimizer(optimizer)
        for step, backward in enumerate(backwards):
            torch.manual_seed(step)
            backward(model, batch(512))
            end_step(optimizer, session)
            moved.append(session.stats.steps[-1].offloaded_bytes if session.stats.steps else 0)
            look(session)
    return copied(list(model.parameters())), moved, session


def _plain(model, hidden):
    model(hidden).square().mean().backward()


def _said(caplog):
    return [one for one in caplog.messages if "such steps are not planned" in one]


def _penalty_apart(model, hidden):
    """The penalty has a micro-batch of its own."""
    inputs = hidden.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).mean(), inputs, create_graph=True)
    gradient.square().sum().backward()
    _plain(model, hidden)


PLAIN, PENALTY, PIECES, APART = [_plain], [_gradient_penalty], [_in_pieces], [_penalty_apart]
WALKS = {  # backwards, a budget, and which of the steps move much: # for yes, . for no
    "a penalty": (4 * PENALTY, "4MiB", "####"),  # as WGAN-GP's (create_graph)
    "in pieces": (4 * PIECES, "4MiB", "####"),  # as the losses of VQGAN (retain_graph)
    "a penalty apart": (4 * APART, "8MiB", "####"),
    # One that begins late, or comes in some steps only (StyleGAN2's lazy regularization): nothing said that it would come.
    "a penalty once": (3 * PLAIN + PENALTY + 4 * PLAIN, "16MiB", "#...####"),
    "a penalty from then on": (3 * PLAIN + 5 * PENALTY, "16MiB", "#...####"),
    # The second step under each plan is measured. What a graph of backward has no part in is seen in no other.
    "in pieces when looked at": (2 * PLAIN + PIECES + 2 * PLAIN, "16MiB", "#..##"),
}


@pytest.mark.parametrize("walk", WALKS)
def test_where_a_graph_is_walked_again_everything_moves_from_then_on(walk, tmp_path, caplog):
    backwards, budget, moves = WALKS[walk]
    expected, _, _ = _steps_of(backwards, OffloadConfig(tier="none"))
    found, moved, session = _steps_of(backwards, auto(tmp_path, budget))
    assert is_same(expected, found)
    assert "".join(".#"[nbytes > 1 << 20] for nbytes in moved) == moves
    (said,) = _said(caplog)
    assert "walks a graph more than once" in said
    assert budget.replace("MiB", ".00 MiB") in said
    assert session.forecast is None


def test_where_a_graph_is_walked_again_over_the_budget_weights_and_state_move_too(tmp_path):
    held = []

    def look(session):
        held.append(session._state.state_placement)

    expected, _, _ = _steps_of(4 * PENALTY, OffloadConfig(tier="none"))
    found, _, _ = _steps_of(4 * PENALTY, auto(tmp_path, "8MiB"), prepares=True, look=look)
    assert is_same(expected, found)
    assert [(one.state, one.weights) for one in held] == [("ssd", "ssd")] * 4


@pytest.mark.parametrize("backwards", [PENALTY, 3 * PLAIN + PENALTY + PLAIN])
def test_where_everything_would_move_a_limit_of_what_a_step_writes_ends_the_run(backwards, tmp_path):
    config = dataclasses.replace(auto(tmp_path, "16MiB"), max_step_write_bytes=1 << 30)
    with pytest.raises(OffloadPlanError, match="max_step_write_bytes of 1"):
        _steps_of(backwards, config)


def _grad_cache(model, hidden):
    """Gradients of the embeddings first; those of the weights a part at a time, in a backward hook."""
    parts, states, embeddings = hidden.chunk(4), [], []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            embeddings.append(model(part))
    leaf = torch.cat(embeddings).requires_grad_()
    F.cross_entropy(leaf[:64] @ leaf.T, torch.arange(64)).backward()

    def backward_of_parts(gradient):
        for part, state, cached in zip(parts, states, leaf.grad.chunk(4), strict=True):
            torch.set_rng_state(state)
            with torch.enable_grad():
                (torch.dot(model(part).flatten(), cached.flatten()) * gradient).backward()

    loss = torch.ones((), requires_grad=True) * 1
    loss.register_hook(backward_of_parts)
    loss.backward()


def test_forwards_in_a_backward_hook_are_offloaded_within_the_budget(tmp_path):
    def under(budget):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session = attach(model, OffloadConfig(tier="none") if budget is None else auto(tmp_path, budget))
        for step in range(3):
            torch.manual_seed(step)
            _grad_cache(model, batch(1024))
            end_step(optimizer, session)
        session.detach()
        return [parameter.detach() for parameter in model.parameters()], session

    expected, _ = under(None)
    found, plenty = under("100MiB")
    assert is_same(expected, found)
    assert plenty.stats.steps[0].offloaded_bytes > 4 << 20  # while it is measured
    assert plenty.forecast.peak_bytes == pytest.approx(plenty.forecast.measured_peak_bytes, rel=0.02)
    budget = plenty.forecast.peak_bytes * 3 // 4
    found, session = under(budget)
    assert is_same(expected, found)
    assert session.forecast.measured_peak_bytes <= session.forecast.peak_bytes <= budget


def test_a_step_over_the_budget_is_said_once_with_figures(tmp_path, caplog):
    """Memory that a loop holds beside the model is no part of any plan: nothing can be moved for it."""
    model, budget = net(), 16 << 20
    with offload_activations(model, auto(tmp_path, budget)) as session, caplog.at_level(logging.WARNING, "hf_offload"):
        for step in range(6):
            loss = model(batch(512)).square().mean()
            beside = torch.zeros(8 << 20) * loss.detach() if step == 2 else None  # counted while a step is measured
            loss.backward()
            model.zero_grad()
            session.end_step()
            del beside
    (said,) = [one for one in caplog.messages if one.startswith("A step took")]
    assert format_bytes(session.most_measured_bytes) in said
    assert format_bytes(session.most_measured_bytes - budget) in said
    assert "memory_budget" in said


@pytest.mark.parametrize("rows", [(64, 512), (512, 64)])
def test_of_micro_batches_that_do_not_fit_the_largest_names_the_budget(rows, tmp_path):
    def steps(budget, count):
        model = net()
        with offload_activations(model, auto(tmp_path, budget)) as session:
            optimizer = torch.optim.AdamW(model.parameters())
            peaks = []  # a step that is slower than its plan is measured for another one, and has none
            for _ in range(count):
                for size in rows:
                    model(batch(size)).square().mean().backward()
                end_step(optimizer, session)
                if session.forecast is not None and session.forecast.measured_peak_bytes is not None:
                    peaks.append(session.forecast.measured_peak_bytes)
            return max(peaks)

    with pytest.raises(OffloadPlanError) as refusal:
        steps("2MiB", 1)
    smallest = refusal.value.smallest_bytes
    assert steps(smallest, 6) <= smallest


def _evaluate(model, rows, gradients=False):
    model.eval()
    with torch.set_grad_enabled(gradients):
        model(batch(rows))
    model.train()


def _generate(model, rows):
    """As a loop samples: in training mode, with longer rows each time, and what was computed before is kept."""
    with torch.no_grad():
        return [model(batch(length)) for length in range(rows // 2, rows, rows // 8)]


EVALUATIONS = {
    "after each step": ("after", _evaluate),
    "before the first step": ("before", _evaluate),
    "within gradient accumulation": ("within", _evaluate),
    "generation": ("after", _generate),
    "with gradients": ("after", functools.partial(_evaluate, gradients=True)),
}


def _accumulating(config, evaluate, when, optimizes=True):
    """Three steps of two micro-batches each, with a larger evaluation ``when``."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with offload_activations(model, config) as session:
        for step in range(3):
            torch.manual_seed(step)
            if when == "before" and step == 0:
                evaluate(model, 2048)
            model(batch(512)).square().mean().backward()
            if when == "within":
                evaluate(model, 2048)
            model(batch(512)).square().mean().backward()
            if optimizes:
                optimizer.step()
            if when == "after" and optimizes:
                evaluate(model, 2048)
            optimizer.zero_grad()
            session.end_step()
            if when == "after" and not optimizes:
                evaluate(model, 2048)
    return copied(list(model.parameters())), session


def _measured(session):
    """What plans were made of."""
    known = session._automatic._decisions._shapes.plans
    found = []
    for shape, one in known.items():
        footprint = one.footprint
        saved = sorted((each.unit, each.nbytes) for each in footprint.saved)
        blocks = [(span.name, span.not_twice) for span in footprint.blocks]
        found.append((shape, saved, blocks, footprint.skipped_blocks, footprint.gradient_bytes))
    return found


@pytest.mark.parametrize("kind", EVALUATIONS)
@pytest.mark.parametrize("optimizes", [True, False])
def test_evaluation_is_no_part_of_a_step(kind, optimizes, tmp_path, caplog):
    when, evaluate = EVALUATIONS[kind]
    budget = 12 << 20
    with caplog.at_level(logging.INFO, "hf_offload"):
        expected, plain = _accumulating(auto(tmp_path, budget), None, "never", optimizes)
        plans = [one for one in caplog.messages if one.startswith(("Plan for", "Corrected", "Measuring", "The step"))]
        caplog.clear()
        found, session = _accumulating(auto(tmp_path, budget), evaluate, when, optimizes)
    again = [one for one in caplog.messages if one.startswith(("Plan for", "Corrected", "Measuring", "The step"))]
    assert is_same(expected, found)
    assert len(again) == len(plans)
    assert _measured(session) == _measured(plain)
    assert session.most_measured_bytes == pytest.approx(plain.most_measured_bytes, rel=0.05)


def test_a_reference_between_forward_and_backward_is_a_part_of_the_step(tmp_path):
    """Its memory comes on top of what the forward has saved: a plan can make room for it."""
    peaks = []
    for rows in (0, 4096):
        model = net()
        with offload_activations(model, auto(tmp_path)) as session:
            loss = model(batch(512)).square().mean()
            if rows:
                with torch.no_grad():
                    model(batch(rows))
            loss.backward()
            session.end_step()
        peaks.append(session.most_measured_bytes)
    assert peaks[1] > peaks[0] + 4096 * 256 * 4 // 2


LEVEL = contextvars.ContextVar("LEVEL", default=1.0)


class Dropping(Net):
    """Without its last block at first, as layer drop may have it."""

    dropped = 1

    def forward(self, hidden):
        for block in self.blocks[: len(self.blocks) - self.dropped]:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("budget", [6_000_000, 7_250_000])
def test_a_block_that_did_not_run_when_a_step_was_measured_is_within_the_budget(budget, tmp_path):
    """What the plan keeps of the last block that ran is in memory when another one runs."""
    torch.manual_seed(0)
    model = Dropping()
    with offload_activations(model, auto(tmp_path, budget)) as session:
        for step in range(3):
            model.dropped = step == 0
            model(batch(512)).square().mean().backward()
            model.zero_grad()
            forecast = session.forecast  # a plan that turns out slower than it was is made again as the step ends
            session.end_step()
    assert forecast.measured_peak_bytes is not None
    assert forecast.measured_peak_bytes <= budget


class ConditionedBlock(Block):
    def forward(self, hidden, options, *, mask):
        seen = F.scaled_dot_product_attention(*[hidden[None, None]] * 3)[0, 0]
        return torch.sin((super().forward(hidden) + seen + 0.1 * mask[0]) * options["scale"] * LEVEL.get())


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(4))

    def forward(self, hidden, options, mask):
        for block in self.blocks:
            hidden = block(hidden, options, mask=[mask])
        return hidden


@contextlib.contextmanager
def _level(value):
    token = LEVEL.set(value)
    yield
    LEVEL.reset(token)


AROUND = {"a context variable": lambda: _level(2.0), "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH)}
WEIGHTS = {"other weights": lambda one: one, "other parameters": nn.Parameter}
CHANGED = ("a tensor", *WEIGHTS)


def _conditioned_step(model, between, step):
    """Gradients. Between forward and backward, something is changed that autograd by itself does not look at again."""
    torch.manual_seed(step)
    hidden, options, mask = batch(256), {"scale": 0.5}, torch.full((WIDTH,), 1.5)
    leaves = dict(model.named_parameters())
    with AROUND.get(between, contextlib.nullcontext)():
        if between in WEIGHTS:
            leaves = {name: WEIGHTS[between]((one.detach() * 0.5).requires_grad_()) for name, one in leaves.items()}
            output = torch.func.functional_call(model, leaves, (hidden, options, mask))
        else:
            output = model(hidden, options, mask)
    if between == "a tensor":
        mask.mul_(2)
    output.square().mean().backward()
    gradients = [leaf.grad for leaf in leaves.values()]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("between", [*AROUND, *CHANGED])
def test_a_recompute_reads_what_its_forward_has_read_or_is_an_error(between, machine_with_drive, tmp_path):
    def gradients(session=None):
        torch.manual_seed(0)
        model = Conditioned() if session is None else session.model
        found = []
        for step in range(5):
            found.append(_conditioned_step(model, "nothing" if between in CHANGED and step < 3 else between, step))
            if session is not None:
                session.end_step()
        return found

    machine_with_drive(1e5)
    torch.manual_seed(0)
    model = Conditioned()
    with offload_activations(model, auto(tmp_path, "3MiB")) as session:
        if between in CHANGED:
            with pytest.raises(RecomputeError, match="has been changed since its forward began"):
                gradients(session)
        else:
            found = gradients(session)
            assert "recompute" in session.plan.reason
            assert all(map(is_same, gradients(), found))


# -- threads ---------------------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """Its forward in a thread of the test's waits until it is let go."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.began, self.may_go = threading.Event(), threading.Event()

    def forward(self, hidden):
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            assert self.may_go.wait(60)
        return self.linear(hidden).sin()


def _in_a_thread(call):
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


@pytest.mark.parametrize("first", [0, 2], ids=["measured", "looked at"])
def test_a_backward_in_another_thread_than_its_forward_ends_planning(first, tmp_path, caplog):
    def backward(model, hidden):
        loss = model(hidden).square().mean()
        _in_a_thread(loss.backward)

    backwards = [_plain] * first + [backward] * 3
    expected, _, _ = _steps_of(backwards, OffloadConfig(tier="none"))
    found, moved, session = _steps_of(backwards, auto(tmp_path, "16MiB"))
    assert is_same(expected, found)
    assert all(nbytes > 1 << 20 for nbytes in moved[first + 1 :])
    (said,) = _said(caplog)
    assert "Several threads" in said
    assert session.forecast is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def _meet(model, hidden):
    """Gradients of two forwards of which one runs within the other, in another thread, and the error of that one."""
    model.began.clear()
    model.may_go.clear()
    thread = threading.Thread(target=lambda: model(hidden).sum().backward(), name="the other")
    thread.start()
    assert model.began.wait(60)
    error = None
    try:
        output = model(hidden)
    except OffloadConfigError as refused:
        error = refused
    model.may_go.set()
    thread.join()
    if error is None:
        output.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return gradients, error


def test_forwards_in_two_threads_at_once_end_planning(tmp_path, caplog):
    torch.manual_seed(0)
    model = Slow()
    expected, _ = _meet(model, batch())
    with offload_activations(model, auto(tmp_path)) as session:
        for _ in range(4):
            gradients, error = _meet(model, batch())
            assert error is None
            assert is_same(expected, gradients)
            session.end_step()
    (said,) = _said(caplog)
    assert "Several threads" in said


class SlowBlocks(Slow):
    """Its blocks are worth recomputing."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, hidden):
        return super().forward(self.net(hidden))


def test_a_forward_within_another_thread_s_is_refused_where_blocks_recompute(machine_with_drive, tmp_path):
    """What two threads recompute at once cannot be told apart."""
    machine_with_drive(1e5)
    torch.manual_seed(0)
    model = SlowBlocks()
    session = attach(model, auto(tmp_path, "3MiB"))
    for _ in range(3):
        model(batch(256)).sum().backward()
        model.zero_grad()
        session.end_step()
    assert "recompute" in session.plan.reason
    _, error = _meet(model, batch(256))
    assert "MainThread has begun one while another thread runs one" in str(error)
    assert "tier='ram'" in str(error)
    session.detach()
