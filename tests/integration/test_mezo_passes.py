"""MeZO with weights on a tier computes both losses in one pass over the weights, in turns, where a model allows that."""

import argparse
import array
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import io
import itertools
import logging
import queue
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
import tqdm
from torch import nn
from transformers import MODEL_MAPPING, GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo import MeZO, passes
from hf_offload.storage.store import whole_pages
from hf_offload.structure.units import find_blocks
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.numerics.test_mezo import ReferenceMeZO

STEPS = 4
SETTINGS = {"eps": 1e-2, "lr": 1e-2, "weight_decay": 0.1}
LOGGER = "hf_offload.optimizers.mezo.passes"


def deep(name="gpt2"):
    """Six blocks, of which two may be in memory."""
    config = tiny_model(name).config
    config.num_hidden_layers = 6
    if name == "t5":
        config.num_decoder_layers = 6
    torch.manual_seed(0)
    return type(tiny_model(name))(config)


def attached(model, tmp_path, tier="ssd", **others):
    others = {"min_bytes": 1024} | others
    if tier == "ssd":
        others["directory"] = str(tmp_path)
    return attach(model, OffloadConfig(tier="none", memory_mode="mezo", params=tier, **others))


def loss_of(model, step):
    return model(**tiny_batch(model.config.model_type, seed=step)).loss


def trained(model, loss_of=loss_of, before=lambda model, step: None):
    """The weights, the log, and the losses, after some steps."""
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    losses = []
    for step in range(STEPS):
        before(model, step)
        losses.append(float(optimizer.step(lambda step=step: loss_of(model, step))))
    return weights(model), optimizer.log, losses


def assert_same(found, expected):
    assert found[1:] == expected[1:]
    assert all(torch.equal(one, expected[0][name]) for name, one in found[0].items())


@pytest.fixture
def said(caplog):
    """What was said of the passes."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.mark.parametrize(("name", "tier"), [("gpt2", "ssd"), ("bert", "ssd"), ("t5", "ram"), ("llama", "ssd")])
def test_one_pass_has_the_bits_of_two_and_of_a_second_implementation(name, tier, tmp_path, said):
    expected = trained(deep(name))
    assert said() == []
    model = deep(name)
    attached(model, tmp_path, tier)
    found = trained(model)
    assert_same(found, expected)
    assert said() == ["MeZO computes both losses of a step in one pass over the weights."]
    theirs = deep(name)
    groups = [{"params": list(theirs.parameters()), "lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}]
    reference = ReferenceMeZO(theirs, groups, SETTINGS["eps"], "reference")
    for row, step in zip(found[1].rows, range(STEPS), strict=True):
        reference.step(row.seed, lambda model, step=step: loss_of(model, step))
    assert all(torch.equal(one, found[0][key]) for key, one in weights(theirs).items())


@pytest.mark.parametrize("ties", [False, True])
def test_one_pass_reads_each_weight_once_and_writes_it_once(ties, tmp_path, said):
    """4 bytes of a parameter in fp32 each way. A tied embedding, which the passes use twice, is read once more."""
    config = GPT2Config(
        n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32, tie_word_embeddings=ties, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    session = attached(model, tmp_path)
    residency = session.residency
    optimizer = MeZO(model.parameters(), model, lr=1e-3)
    words = torch.arange(32)[None]
    moved = []
    for _ in range(5):
        optimizer.step(lambda: model(words, labels=words).loss)
        residency.store.settle()
        moved.append(residency.moved_bytes)
    assert said() == ["MeZO computes both losses of a step in one pass over the weights."]
    (written, read), (written_later, read_later) = moved[3:5]
    again = model.transformer.wte.weight.nbytes if ties else 0
    assert residency.limit_bytes < residency.total_bytes / 4
    in_pages = sum(whole_pages(one.nbytes) for one in residency.weights())
    assert 0 < written_later - written <= in_pages
    largest = max(one.nbytes for one in residency.weights() if "attn" in one.name)  # where the passes meet the head
    assert 0 < read_later - read <= in_pages + again + largest
    assert residency.most_bytes <= residency.budget_bytes


def hooked(model, first, last):
    """``model``, with hooks in front of its first block and in front of its last one."""
    blocks = list(find_blocks(model).values())
    blocks[0].register_forward_pre_hook(first)
    blocks[-1].register_forward_pre_hook(last)
    return model


def draws(model):
    def draw(block, args):
        return (args[0] * torch.rand(()), *args[1:])

    return hooked(model, draw, draw)


def leaves_something_on_itself(model):
    def leave(block, args):
        model.left = args[0].mean()

    def find(block, args):
        return (args[0] + model.left, *args[1:])

    return hooked(model, leave, find)


def looks_at_a_weight(model, name="transformer.wpe.weight"):
    def look(block, args):
        model.seen = model.get_parameter(name)[:1].view(-1)

    def see(block, args):
        seen, model.seen = model.seen, None
        return (args[0] + seen, *args[1:])

    return hooked(model, look, see)


def looks_at_a_small_weight(model):
    return looks_at_a_weight(model, "transformer.ln_f.bias")


UNFIT = [draws, leaves_something_on_itself, looks_at_a_weight, looks_at_a_small_weight]


@pytest.mark.parametrize("way", UNFIT)
def test_a_model_whose_passes_cannot_take_turns_has_the_bits_of_two_passes(way, tmp_path, said):
    expected = []
    for model in (way(deep()), way(deep())):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model), torch.get_rng_state()
        expected = expected or found
    assert_same(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert said()
    assert all("in two passes over the weights, as the model" in each for each in said())


def test_random_numbers_that_a_later_step_draws_are_those_of_two_passes(tmp_path, said):
    def sometimes(model, step):
        return loss_of(model, step) * (torch.rand(()) if step == 2 else 1.0)

    expected = []
    for model in (deep(), deep()):
        if expected:
            attached(model, tmp_path)
        torch.manual_seed(5)
        found = trained(model, sometimes), torch.rand(())
        expected = expected or found
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    assert ["in one pass" in each for each in said()] == [True, False, True]


LEFT = None


class Kept:
    """Where a model keeps something between its blocks."""

    def __init__(self, model):
        self.model = model


class OnItself(Kept):
    def put(self, value):
        self.model.left = value

    def get(self):
        return self.model.left


class OnItselfForAWhile(OnItself):
    def get(self):
        left = self.model.left
        del self.model.left
        return left


class OnABlock(Kept):
    def put(self, value):
        self.model.transformer.h[2].attn.left = value

    def get(self):
        return self.model.transformer.h[2].attn.left


class OnAClass(Kept):
    def put(self, value):
        type(self.model).left = value

    def get(self):
        return type(self.model).left


class InAFile(Kept):
    def put(self, value):
        global LEFT
        LEFT = value

    def get(self):
        return LEFT


class InAList(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.left = {"lists": [[]]}

    def put(self, value):
        self.model.left["lists"][0].append(value)

    def get(self):
        return self.model.left["lists"][0][-1]


class InAnObject(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.left = types.SimpleNamespace(values=collections.deque(maxlen=1))

    def put(self, value):
        self.model.left.values.append(value)

    def get(self):
        return self.model.left.values[0]


class InAQueue(Kept):
    """Where Python finds nothing."""

    def __init__(self, model):
        super().__init__(model)
        self.left = queue.LifoQueue()

    def put(self, value):
        self.left.put(value)

    def get(self):
        return self.left.get()


class InABuffer(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.register_buffer("left", torch.zeros(()))

    def put(self, value):
        self.model.left.copy_(value)

    def get(self):
        return self.model.left


class InAGenerator(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.generator = torch.Generator().manual_seed(3)

    def put(self, value):
        torch.rand((), generator=self.model.generator)

    def get(self):
        return torch.rand((), generator=self.model.generator)


class InAGeneratorOfNumPy(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.generator = np.random.default_rng(3)

    def put(self, value):
        self.model.generator.random()

    def get(self):
        return self.model.generator.random()


class InAFormerGeneratorOfNumPy(InAGeneratorOfNumPy):
    def __init__(self, model):
        super().__init__(model)
        model.generator = types.SimpleNamespace(random=None, former=np.random.RandomState(3))
        model.generator.random = model.generator.former.random_sample


class InAGeneratorOfPython(InAGeneratorOfNumPy):
    def __init__(self, model):
        super().__init__(model)
        model.generator = random.Random(3)


class InACount(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.calls = 0

    def put(self, value):
        self.model.calls += 1

    def get(self):
        return self.model.calls / 10


class InAnArray(Kept):
    values = staticmethod(lambda: np.zeros(1))

    def __init__(self, model):
        super().__init__(model)
        model.left = self.values()

    def put(self, value):
        self.model.left[0] = value

    def get(self):
        return float(self.model.left[0])


class InAnArrayInAClosure(InAnArray):
    def __init__(self, model):
        super().__init__(types.SimpleNamespace())


class InAnArrayOfObjects(InAnArray):
    values = staticmethod(lambda: np.array([0.0], dtype=object))


class InAnArrayOfPython(InAnArray):
    values = staticmethod(lambda: array.array("d", [0.0]))


class InAnArrayOfC(InAnArray):
    values = staticmethod(lambda: (ctypes.c_double * 1)())


class InAViewOfBytes(InAnArray):
    values = staticmethod(lambda: memoryview(bytearray(8)).cast("d"))


class InANamespace(Kept):
    values = argparse.Namespace

    def __init__(self, model):
        super().__init__(model)
        model.left = self.values()

    def put(self, value):
        self.model.left.value = value

    def get(self):
        return self.model.left.value


class WithSlots:
    __slots__ = ("value",)


class InASlot(InANamespace):
    values = WithSlots


class WithAttributes(list):
    pass


class OnAList(InANamespace):
    values = WithAttributes


class InAQueueOfTheModel(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.left = queue.LifoQueue()

    def put(self, value):
        self.model.left.put(value)

    def get(self):
        return self.model.left.get()


def pair():
    left = None

    def put(self, value):
        nonlocal left
        left = value

    return put, lambda self: left


class InAClosureOfAClass(Kept):
    put, get = pair()


class OnAFunction(Kept):
    def put(self, value):
        pair.left = value

    def get(self):
        return pair.left


MODULE = nn.Module()


class InAModuleOfAFile(Kept):
    def put(self, value):
        MODULE.left = value

    def get(self):
        return MODULE.left


class Values:
    values = ()


class Holding:
    """A class of a file is not looked at, if none of the model's objects is of it."""

    held = Values()


class BehindAWeakReference(Kept):
    def __init__(self, model):
        super().__init__(model)
        model.left = weakref.ref(Holding.held)

    def put(self, value):
        self.model.left().values = [value]

    def get(self):
        return self.model.left().values[0]


VARIABLE = contextvars.ContextVar("left", default=None)


class InAVariable(Kept):
    def put(self, value):
        VARIABLE.set(value)

    def get(self):
        return VARIABLE.get()


def leaving(kept, as_number):
    """A model that leaves something to its last block from the step 1 on."""

    def leave(block, args):
        if model.leaves:
            value = args[0].mean() * 10
            kept.put(float(value) if as_number else value)

    def find(block, args):
        return (args[0] + kept.get(), *args[1:]) if model.leaves else None

    model = hooked(deep(), leave, find)
    model.leaves = False
    kept = kept(model)
    return model


def begin_to_leave(model, step):
    model.leaves = step > 0


ANYWHERE = [
    *(OnItself, OnItselfForAWhile, OnABlock, OnAClass, InAFile, InAList, InAnObject),
    *(InAnArray, InAnArrayInAClosure, InAnArrayOfObjects, InAnArrayOfPython, InAnArrayOfC, InAViewOfBytes),
    *(InANamespace, InASlot, OnAList, InAQueueOfTheModel, InAClosureOfAClass, OnAFunction, InAVariable),
    *(InAModuleOfAFile, BehindAWeakReference),
]
TABLE = MODEL_MAPPING
"""Of this file, at which a pass looks: reading it would import all models."""

LEAVING = [
    (OnItself, False),
    *((kind, True) for kind in ANYWHERE),
    *((kind, False) for kind in (InAQueue, InABuffer, InAGenerator, InAGeneratorOfNumPy, InAFormerGeneratorOfNumPy)),
]


@pytest.mark.parametrize(("kind", "as_number"), LEAVING)
def test_what_a_model_leaves_between_its_blocks_from_a_later_step_on_is_that_of_two_passes(kind, as_number, said):
    expected = []
    for attaches in (False, True):
        model = leaving(kind, as_number)
        if attaches:
            attached(model, None, "ram")
        found = trained(model, before=begin_to_leave)
        expected = expected or found
    if kind is OnAClass:
        del type(model).left
    assert_same(found, expected)
    assert ["in one pass" in each for each in said()][:2] == [True, False]


def multiplied(model):
    model.left = model.left * 1.5
    return torch.sparse.sum(model.left)


class Counting(threading.Thread):
    count = 0

    def add(self):
        self.count += 1
        return self.count


UNKNOWN = {
    "an iterator": (itertools.count, lambda model: next(model.left)),
    "a queue": (queue.SimpleQueue, lambda model: model.left.put(0) or model.left.qsize()),
    "a list's iterator": (lambda: iter([0.1, 0.2] * 100), lambda model: next(model.left)),
    "a thread": (Counting, lambda model: model.left.add()),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), multiplied),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_that_keeps_what_cannot_be_compared_has_the_bits_of_two_passes(kind, said):
    kept, use = UNKNOWN[kind]
    expected = []
    for attaches in (False, True):
        model = deep()
        model.left = kept()
        for block in model.transformer.h:
            block.register_forward_pre_hook(lambda _, args, m=model: (args[0] + 0.001 * use(m), *args[1:]))
        if attaches:
            attached(model, None, "ram")
        found = trained(model)
        expected = expected or found
    assert_same(found, expected)
    assert all("in two passes" in each and ("left" in each or "strided" in each) for each in said())


def test_a_progress_bar_that_moves_in_every_block_does_not_end_a_pass(said):
    """Its monitor, a thread of its own, writes to it as well."""
    progress = tqdm.tqdm(file=io.StringIO(), mininterval=0)
    found = []
    for attaches in (False, True):
        model = deep()
        for block in model.transformer.h:
            block.register_forward_pre_hook(
                lambda *_: progress.update() and setattr(tqdm.tqdm.monitor, "woken", progress.n)
            )
        if attaches:
            attached(model, None, "ram")
        found.append(trained(model))
    progress.close()
    assert_same(*found)
    assert progress.n
    assert said() == ["MeZO computes both losses of a step in one pass over the weights."]


def test_what_a_closure_and_functions_keep_between_blocks_is_that_of_two_passes(said):
    def trained_with(attaches):
        left = 0.0

        def leave(block, args):
            nonlocal left
            left = float(args[0].mean())

        def find(block, args, found=[0.0]):  # noqa: B006 - kept by the function
            found[0] += left
            return (args[0] + found[0], *args[1:])

        model = hooked(deep(), leave, find)
        if attaches:
            attached(model, None, "ram")
        return trained(model)

    assert_same(trained_with(True), trained_with(False))
    assert all("in two passes" in each for each in said())


def test_a_pass_that_was_given_up_leaves_nothing_and_the_next_is_tried_ever_more_seldom(said, monkeypatch):
    """What a model counts is what it counts in memory, and passes take turns again where it has stopped."""
    tried = []
    in_turns = passes.run_in_turns
    monkeypatch.setattr(passes, "run_in_turns", lambda *args: tried.append(step) or in_turns(*args))
    model = leaving(InACount, False)
    attached(model, None, "ram")
    optimizer = MeZO(model.parameters(), model, **SETTINGS)
    for step in range(10):
        model.leaves = step in range(1, 5)
        optimizer.step(lambda step=step: loss_of(model, step))
    assert model.calls == 2 * 4
    assert tried == [0, 1, 2, 4, 8, 9]
    assert ["in one pass" in each for each in said()] == [True, False, True]


class Lost(Exception):
    pass


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [Lost, KeyboardInterrupt])
def test_an_error_in_either_pass_leaves_weights_as_two_passes_would(which, error, tmp_path):
    results = []
    for model in (deep(), deep()):
        takes_turns = bool(results)
        if takes_turns:
            attached(model, tmp_path)
        optimizer = MeZO(model.parameters(), model, **SETTINGS)
        optimizer.step(lambda model=model: loss_of(model, 0))
        optimizer.step(lambda model=model: loss_of(model, 1))
        event = threading.Event()  # what is on it is not looked at
        event.calls = []

        def fail(block, args, event=event):
            event.calls.append(threading.get_ident())
            if len(event.calls) > which:
                raise error("in a block")

        threads = threading.active_count()
        handle = list(find_blocks(model).values())[3].register_forward_pre_hook(fail)
        with pytest.raises(error, match="in a block"):
            optimizer.step(lambda model=model: loss_of(model, 2))
        handle.remove()
        assert len(set(event.calls)) == (1 + which if takes_turns else 1)
        assert threading.active_count() <= threads  # those of other models may end meanwhile
        loss = float(optimizer.step(lambda model=model: loss_of(model, 3)))
        results.append((weights(model), optimizer.log, loss))
    assert_same(results[1], results[0])


def clamp(weight):
    weight.clamp_(-0.01, 0.01)


def scale_data(weight):
    weight.data.mul_(0.5)


def write_out(weight):
    torch.mul(weight, 0.5, out=weight)


def scale_each(weight):
    torch._foreach_mul_([weight], 0.5)


def renormalize(weight):
    nn.functional.embedding(torch.arange(4), weight, max_norm=0.01)


def replace_data(weight):
    weight.data = weight.data * 0.5


def fill_from_vector(weight):
    nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])


def clamp_in_a_thread(weight):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(clamp_without_graph, weight).result()


@torch.no_grad()
def clamp_without_graph(weight):
    clamp(weight)


def clamp_and_hide(weight):
    with contextlib.suppress(OffloadError):
        clamp(weight)


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((each, "changes its weight .*h.3.mlp.c_fc.weight in place") for each in (clamp, scale_data, write_out)),
        *((each, "changes its weight .*h.3.mlp.c_fc.weight in place") for each in (scale_each, renormalize)),
        (clamp_and_hide, "changes its weight .*h.3.mlp.c_fc.weight in place"),
        (clamp_in_a_thread, "weight .*h.3.mlp.c_fc.weight was changed in place"),
    ],
)
def test_a_forward_that_changes_a_weight_is_refused_and_weights_go_back(change, message, restore, tmp_path):
    """In memory the change would stay."""
    results = []
    for attaches in (False, True):
        model = deep()
        if attaches:
            attached(model, tmp_path)
        optimizer = MeZO(model.parameters(), model, restore=restore, **SETTINGS)
        optimizer.step(lambda model=model: loss_of(model, 0))
        layer = model.transformer.h[3].mlp.c_fc

        def fail(layer, args, attaches=attaches):
            if not attaches:
                raise Lost
            with torch.no_grad():
                change(layer.weight)

        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(OffloadError if attaches else Lost, match=message if attaches else None):
            optimizer.step(lambda model=model: loss_of(model, 1))
        handle.remove()
        loss = float(optimizer.step(lambda model=model: loss_of(model, 2)))
        results.append((weights(model), optimizer.log, loss))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("change", [replace_data, fill_from_vector])
def test_a_forward_that_gives_a_weight_other_memory_is_refused(change, restore, tmp_path):
    model = deep()
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model, restore=restore, **SETTINGS)
    optimizer.step(lambda: loss_of(model, 0))
    layer = model.transformer.h[3].mlp.c_fc
    layer.register_forward_pre_hook(lambda layer, args: change(layer.weight))
    with pytest.raises(OffloadError, match=r"weight .*h.3.mlp.c_fc.weight"):
        optimizer.step(lambda: loss_of(model, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of SystemExit, too
def test_a_thread_of_the_closure_that_looks_at_weights_lets_a_step_take_two_passes(said):
    """It ends with an error where passes take turns, and the closure fails for want of its result."""

    def trained_with(attaches):
        model = deep()
        if attaches:
            attached(model, None, "ram")

        def loss(step):
            found = []

            def compute():
                with torch.no_grad():
                    found.append(loss_of(model, step + 10))

            thread = threading.Thread(target=compute)
            thread.start()
            first = loss_of(model, step)
            thread.join()
            return first + found[0]

        optimizer = MeZO(model.parameters(), model, **SETTINGS)
        losses = [float(optimizer.step(lambda step=step: loss(step))) for step in range(STEPS)]
        return weights(model), optimizer.log, losses

    assert_same(trained_with(True), trained_with(False))
    assert said()[:1] == [
        "MeZO computes both losses of a step in two passes over the weights, as the model looks at its weights between its "
        "blocks."
    ]


def test_passes_do_not_take_turns_where_most_weights_stay_in_memory(tmp_path, said):
    """There it would write all of them, and two passes only what leaves."""
    model = deep()
    session = attached(model, tmp_path, memory_budget="1MiB")
    assert session.residency.limit_bytes > session.residency.total_bytes / 2
    assert_same(trained(model), trained(deep()))
    assert said() == []


def test_a_model_without_blocks_is_trained_in_two_passes(tmp_path, said):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    attached(model, tmp_path)
    optimizer = MeZO(model.parameters(), model)
    optimizer.step(lambda: model(torch.ones(1, 32)).sum())
    assert said() == []
