"""Whatever way a block's code reaches state that its forward changes, and whatever holds that state: it is found."""

import collections
import functools
import itertools
import random
import types
import weakref

import numpy
import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload.engine.recompute import Recompute
from hf_offload.errors import RecomputeError
from hf_offload.structure.block_state import changed_name, state_of
from hf_offload.structure.reach import MOST_OBJECTS
from tests.helpers import reached_state

WIDTH, STEPS = 4, 3

# -- kinds of state: what there is at first, and a number from it with what takes its place ------------------------------


def counter(state):
    return state + 1, state + 1


def appended(state):
    state.append(len(state))
    return len(state), state


def added(state):
    state.add(len(state))
    return len(state), state


def counted(state):
    state["calls"] = state.get("calls", 0) + 1
    return state["calls"], state


def written(state):
    state += 1
    return float(state[0]), state


def written_past_the_version(state):
    state.data.add_(1)
    return float(state), state


def replaced(state):
    return float(state) + 1, state + 1


def next_of(state):
    return next(state), state


def uniform(state):
    return float(state.uniform(0, 9)), state


def torchs(state):
    return float(torch.rand((), generator=state)), state


def text(state):
    return len(state) + 1, state + "x"


KINDS = {
    "a counter": (lambda: 0, counter),
    "a string": (lambda: "", text),
    "a list": (list, appended),
    "a set": (set, added),
    "a deque": (collections.deque, appended),
    "bytes": (bytearray, appended),
    "a dict": (dict, counted),
    "a tensor, in place": (lambda: torch.zeros(1), written),
    "a tensor, by its data": (lambda: torch.zeros(()), written_past_the_version),
    "another tensor": (lambda: torch.zeros(()), replaced),
    "an array": (lambda: numpy.zeros(1), written),
    "itertools.count": (itertools.count, next_of),
    "an iterator": (lambda: iter(range(99)), next_of),
    "a generator": (lambda: (one for one in range(99)), next_of),
    "random.Random": (lambda: random.Random(0), uniform),
    "RandomState": (lambda: numpy.random.RandomState(0), uniform),
    "numpy.random.Generator": (lambda: numpy.random.default_rng(0), uniform),
    "torch.Generator": (lambda: torch.Generator().manual_seed(0), torchs),
}

# -- what holds it ------------------------------------------------------------------------------------------------------


def use_attribute(change, holder):
    number, holder.state = change(holder.state)
    return number


def use_item(change, holder):
    number, holder["state"] = change(holder["state"])
    return number


def use_element(change, holder):
    number, holder[0] = change(holder[0])
    return number


def use_child(change, holder):
    return use_attribute(change, holder.inner)


def use_named_attribute(change, holder):
    number, value = change(getattr(holder, "state"))  # noqa: B009
    setattr(holder, "state", value)  # noqa: B010
    return number


class Monitor(nn.Module):
    """Outside of the block."""

    def record(self, use):
        return use(self)


class Plain:
    def record(self, use):
        return use(self)


class Slots:
    __slots__ = ("__weakref__", "state")

    def record(self, use):
        return use(self)


class Keeper(type):
    def record(cls, use):
        return use(cls)


class Dict(dict):
    def record(self, use):
        return use(self)


class List(list):
    def record(self, use):
        return use(self)


def with_state(holder, state):
    holder.state = state
    return holder


def module_with_a_buffer(state):
    monitor = Monitor()
    if isinstance(state, torch.Tensor):
        monitor.register_buffer("state", state)
    else:
        monitor.state = state
    return monitor


def module_with_a_child(state):
    monitor = Monitor()
    monitor.inner = with_state(nn.Module(), state)
    return monitor


HOLDERS = {
    "a module": (module_with_a_buffer, use_attribute),
    "a module, by name": (module_with_a_buffer, use_named_attribute),
    "a child of a module": (module_with_a_child, use_child),
    "the model": (None, use_attribute),
    "a module of the block": (None, use_attribute),
    "an object": (lambda state: with_state(Plain(), state), use_attribute),
    "slots": (lambda state: with_state(Slots(), state), use_attribute),
    "a class": (lambda state: Keeper("Kept", (), {"state": state}), use_attribute),
    "a dict": (lambda state: Dict(state=state), use_item),
    "a list": (lambda state: List([state]), use_element),
}


def look_at(state):
    return 1, state


# -- how the block's code reaches it ------------------------------------------------------------------------------------


def scaled(output, number):
    return output * (1 + number / 8)


def by_closure(block, holder, use):
    block.up.register_forward_hook(lambda module, args, output: scaled(output, use(holder)))


def by_bound_method(block, holder, use):
    record = holder.record
    block.up.register_forward_hook(lambda module, args, output: scaled(output, record(use)))


def by_bound_hook(block, holder, use):
    block.up.register_forward_hook(types.MethodType(lambda own, module, args, output: scaled(output, use(own)), holder))


def by_default(block, holder, use):
    def hook(module, args, output, holder=holder, *, use=use):
        return scaled(output, use(holder))

    block.up.register_forward_hook(hook)


def by_partial(block, holder, use):
    def hook(holder, use, module, args, output):
        return scaled(output, use(holder))

    block.up.register_forward_hook(functools.partial(hook, holder, use))


def by_attribute_of_a_function(block, holder, use):
    def hook(module, args, output):
        return scaled(output, use(hook.holder))

    hook.holder = holder
    block.up.register_forward_hook(hook)


def by_decorator(block, holder, use):
    def decorated(function):
        @functools.wraps(function)
        def hook(module, args, output):
            return scaled(function(module, args, output), use(holder))

        return hook

    @decorated
    def hook(module, args, output):
        return output

    block.up.register_forward_hook(hook)


def by_callable_object(block, holder, use):
    class Hook:
        def __call__(self, module, args, output):
            return scaled(output, use(holder))

    block.up.register_forward_hook(Hook())


def by_global(block, holder, use):
    reached_state.HOLDER = holder
    block.up.register_forward_hook(lambda module, args, output: scaled(output, use(reached_state.HOLDER)))


def by_function_of_another_file(block, holder, use):
    reached_state.HOLDER = holder
    block.effect = lambda: reached_state.call(use)


def by_attribute(block, holder, use):
    object.__setattr__(block, "holder", holder)
    block.effect = lambda: use(block.holder)


def by_list_of_attributes(block, holder, use):
    block.holders = [{"first": (holder,)}]
    block.effect = lambda: use(block.holders[0]["first"][0])


def by_weak_reference(block, holder, use):
    block.holder = weakref.ref(holder)
    block.effect = lambda: use(block.holder())


def by_proxy(block, holder, use):
    object.__setattr__(block, "holder", weakref.proxy(holder))
    block.effect = lambda: use(block.holder)


def by_another_object(block, holder, use):
    other = Plain()
    other.holder = holder
    block.effect = lambda: use(other.holder)


def by_another_module(block, holder, use):
    other = nn.Module()
    object.__setattr__(other, "holder", holder)
    block.up.register_forward_hook(lambda module, args, output: scaled(output, use(other.holder)))


def by_class(block, holder, use):
    class Kept(type(block)):
        kept = (holder,)

        @property
        def number(self):
            return use(self.kept[0])

        def effect(self):
            return self.number

    block.__class__ = Kept


def by_closure_of_a_method(block, holder, use):
    class Kept(type(block)):
        def effect(self):
            return max(use(one) for one in (holder,))

    block.__class__ = Kept


def by_hook_of_all_modules(block, holder, use):
    def hook(module, args, output):
        return scaled(output, use(holder)) if module is block.up else None

    return nn.modules.module.register_module_forward_hook(hook)


WAYS = [value for name, value in sorted(globals().items()) if name.startswith("by_")]


class Block(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def effect(self):
        return 0

    def forward(self, hidden):
        return hidden + self.down(scaled(self.up(hidden), self.effect()).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def record(self, use):
        return use(self)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        self.last = hidden.detach()
        return hidden.square().mean()


class Case:
    """A model whose middle block reaches state."""

    def __init__(self, way, holder, kind, changes=True):
        first, change = KINDS[kind]
        self.model = Model()
        self.block = self.model.layers[1]
        make, use = HOLDERS[holder]
        if holder == "the model":
            self.holder = with_state(self.model, first())
        elif holder == "a module of the block":
            self.holder = with_state(self.block.down, first())
            self.holder.record = functools.partial(Monitor.record, self.holder)
        else:
            self.holder = make(first())
        self.change = change
        self.use = functools.partial(use, change if changes else look_at)
        self.handle = way(self.block, self.holder, self.use)

    def losses(self, recompute):
        """Of some steps; None if an error says that the block cannot be recomputed."""
        recompute = Recompute({"layers.1": self.block} if recompute else {})
        recompute.apply(["layers.1"])
        losses = []
        try:
            for _ in range(STEPS):
                loss = self.model(torch.ones(2, WIDTH))
                loss.backward()
                losses.append([loss.item(), *(parameter.grad.tolist() for parameter in self.model.parameters())])
        except RecomputeError:
            return None
        finally:
            self.end(recompute)
        return losses

    def changed_by_a_forward(self):
        before = state_of(self.block, values=True)
        self.block(torch.ones(2, WIDTH))
        changed = changed_name(before, state_of(self.block, values=True))
        self.end()
        return changed

    def end(self, *more):
        for one in (self.handle, *more):
            if one is not None:
                one.remove()


def cases():
    """Each way to each holder with one kind of state, and each kind of state of each holder; all else in the full suite."""
    for way, holder, kind in itertools.product(WAYS, HOLDERS, KINDS):
        is_one_of_each = kind == "a counter" or (way is by_closure and holder in ("a module", "an object", "a dict"))
        yield pytest.param(way, holder, kind, marks=() if is_one_of_each else pytest.mark.full)


@pytest.mark.parametrize(("way", "holder", "kind"), list(cases()))
def test_a_change_is_found_before_and_after_a_forward_and_in_backward(way, holder, kind):
    assert Case(way, holder, kind).changed_by_a_forward()
    if (
        kind == "a tensor, by its data"
    ):  # only the operation is seen, and small tensors are compared while it is measured
        return
    found = Case(way, holder, kind).losses(recompute=True)
    assert found is None or found == Case(way, holder, kind).losses(recompute=False)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_changes_nothing_is_recomputed(way, holder):
    """Although the model around it keeps something of every forward."""
    assert not Case(way, holder, "a counter", changes=False).changed_by_a_forward()
    found = Case(way, holder, "a counter", changes=False).losses(recompute=True)
    assert found == Case(way, holder, "a counter", changes=False).losses(recompute=False)


class Counting(Model):
    """Counts behind its blocks."""

    calls = 0

    def forward(self, hidden):
        loss = super().forward(hidden)
        self.calls = self.calls + 1
        return loss


def test_what_the_model_changes_behind_a_block_that_reads_it_is_found():
    model = Counting()
    model.layers[1].up.register_forward_hook(lambda module, args, output: scaled(output, model.calls))
    Recompute({"layers.1": model.layers[1]}).apply(["layers.1"])
    with pytest.raises(RecomputeError, match=r"calls of layers\.1 has been changed"):
        model(torch.ones(2, WIDTH)).backward()


def test_a_hook_that_is_taken_off_before_backward_is_found():
    model = Model()
    Recompute({"layers.1": model.layers[1]}).apply(["layers.1"])
    handle = model.layers[1].up.register_forward_hook(lambda module, args, output: output * 2)
    loss = model(torch.ones(2, WIDTH))
    handle.remove()
    with pytest.raises(RecomputeError, match=r"up\.hooks of layers\.1 has been changed"):
        loss.backward()


def test_a_block_that_reaches_too_much_to_compare_counts_as_changed():
    model = Model()
    model.layers[1].many = [[] for _ in range(MOST_OBJECTS + 1)]
    before, after = (state_of(model.layers[1], values=True) for _ in range(2))
    assert changed_name(before, after) == "one of more than 5,000 objects"


def test_attributes_of_the_same_name_of_two_classes_are_both_compared():
    class Base(Block):
        calls = 0

        def forward(self, hidden):
            Base.calls += 1
            return super().forward(hidden)

    class Derived(Base):
        calls = 0

    block = Derived()
    before = state_of(block, values=True)
    block(torch.ones(2, WIDTH))
    assert changed_name(before, state_of(block, values=True))
