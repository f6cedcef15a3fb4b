"""Whatever the code of a block may name or hold, most of all what it may call."""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import enum
import functools
import operator
import re
import threading
import types
import unittest.mock
import warnings
import weakref

import numpy
import torch
from torch import nn


def decorated(function):
    def wrapper(x):
        return function(x)

    return functools.wraps(function)(wrapper)


def around(wrapped):
    """A function that says it wraps this, whatever it is."""

    def wrapper(x):
        return x

    wrapper.__wrapped__ = wrapped
    return wrapper


class Called:
    def __call__(self, x):
        return x.tanh()

    def method(self, x):
        return x.tanh()

    @classmethod
    def of_class(cls, x):
        return x.tanh()

    @staticmethod
    def static(x):
        return x.tanh()


class Slots:
    __slots__ = ("__empty", "__held", "__weakref__")

    def __init__(self):
        self.__held = [1]


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Subclass(torch.Tensor):
    pass


class Meta(type):
    def __call__(cls, x):
        return x.tanh()


class OfMeta(metaclass=Meta):
    pass


class Number(enum.Enum):
    ONE = 1


@dataclasses.dataclass(slots=True)
class Data:
    one: int = 1


class Raises:
    """At every attribute that it does not have."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class Unreachable:
    def __getattribute__(self, name):
        raise RuntimeError(name)


class Raising:
    def __get__(self, instance, owner=None):
        raise RuntimeError("no")


class WithRaising:
    here = Raising()
    __dict__ = Raising()


class Liar:
    __class__ = nn.Module


class Nameless:
    __module__ = None


class Equal:
    __hash__ = None

    def __eq__(self, other):
        return torch.ones(2)


class EqualNumber(float):
    __hash__ = None

    def __eq__(self, other):
        return torch.ones(2)


class Items(dict):
    def items(self):
        raise RuntimeError("items")


class Elements(list):
    def __iter__(self):
        raise RuntimeError("elements")


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise RuntimeError(name)


class WithDescriptors:
    single = functools.singledispatchmethod(Called.static)
    part = functools.partialmethod(Called.static)
    cached = functools.cached_property(Called())
    prop = property(operator.attrgetter("cached"))
    kept = functools.lru_cache(torch.tanh)

    def __call__(self, x):
        return x


def module_of_raising():
    module = Lazy("raises_at_attributes")
    module.here = 1
    return module


def looped():
    function = around(None)
    function.__wrapped__ = function
    return function


def empty_cell():
    def function(x):
        return later if x is None else x

    if function is None:
        later = None
    return function


def generator():
    yield 1


async def coroutine(x):
    return x


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def times_two(x):
    return x * 2


_kept = Called()
TORCHSCRIPT = {
    "a script": lambda: quietly(lambda: torch.jit.script(times_two)),
    "a trace": lambda: quietly(lambda: torch.jit.trace(torch.neg, torch.ones(2), check_trace=False)),
    "around a script": lambda: decorated(quietly(lambda: torch.jit.script(times_two))),
    "a scripted module": lambda: quietly(lambda: torch.jit.script(nn.Sequential(nn.LeakyReLU(0.5)))),
}
CALLED = {
    "a builtin": lambda: torch.tanh,
    "around a builtin": lambda: decorated(torch.tanh),
    "around a method of C": lambda: decorated(torch.Tensor.tanh),
    "around a partial": lambda: decorated(functools.partial(torch.tanh)),
    "around a partial of a function": lambda: decorated(functools.partial(times_two)),
    "around an object": lambda: decorated(Called()),
    "around a bound method": lambda: decorated(Called().method),
    "around a class method": lambda: decorated(Called.of_class),
    "around a static method": lambda: decorated(staticmethod(torch.tanh)),
    "around a module": lambda: decorated(nn.Tanh()),
    "around what is wrapped": lambda: decorated(decorated(decorated(torch.tanh))),
    "around a cached function": lambda: decorated(functools.lru_cache(times_two).__wrapped__),
    "around a loop": looped,
    "around nothing": lambda: around(None),
    "a partial": lambda: functools.partial(torch.add, 1),
    "a partial of a partial": lambda: functools.partial(functools.partial(torch.add, alpha=2), 1),
    "an object": Called,
    "a method": lambda: Called().method,
    "a static method": lambda: staticmethod(torch.tanh),
    "a lambda": lambda: lambda x: x * 3,
    "a function with an empty cell": empty_cell,
    "a singledispatch": lambda: functools.singledispatch(times_two),
    "a itemgetter": lambda: operator.itemgetter(...),
    "a methodcaller": lambda: operator.methodcaller("tanh"),
    "an operator": lambda: torch.ops.aten.tanh,
    "an overload": lambda: torch.ops.aten.tanh.default,
    "a Function": lambda: Function.apply,
    "a vmap": lambda: torch.vmap(torch.tanh),
    "a function under autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)(torch.tanh),
    "a class by its metaclass": lambda: OfMeta,
    "a module": nn.Tanh,
    "an object with descriptors": WithDescriptors,
    "a proxy": lambda: weakref.proxy(_kept),
    **TORCHSCRIPT,
}
"""Name -> what makes one, that is called with a tensor and gives one like it."""

RAISING = {
    "an unreachable object": lambda: object.__new__(Unreachable),
    "an object that raises": WithRaising,
    "one that is said to be a module": Liar,
    "a mock of a module": lambda: unittest.mock.Mock(spec=nn.Module),
    "a dict that raises": lambda: Items(one=1),
    "a list that raises": lambda: Elements([1]),
    "a dead proxy": lambda: weakref.proxy(Called()),
}
"""What cannot be looked into."""

HELD = {
    "a function without gradients": lambda: torch.no_grad()(torch.tanh),
    "a cached function": lambda: functools.lru_cache(times_two),
    "around what raises": lambda: around(Raises()),
    "a class method": lambda: vars(Called)["of_class"],
    "a property": lambda: vars(WithDescriptors)["prop"],
    "a cached property": lambda: functools.cached_property(Called()),
    "a partial method": lambda: functools.partialmethod(torch.tanh),
    "a method of dispatch": lambda: functools.singledispatchmethod(times_two),
    "a generator function": lambda: generator,
    "a generator": generator,
    "a coroutine function": lambda: coroutine,
    "an event loop's policy": asyncio.DefaultEventLoopPolicy,
    "a context manager": lambda: contextlib.contextmanager(generator),
    "a ufunc": lambda: numpy.tanh,
    "a vectorized function": lambda: numpy.vectorize(abs),
    "a function of C": lambda: ctypes.pythonapi.Py_GetVersion,
    "a compiled function": lambda: torch.compile(times_two),
    "a class of tensors": lambda: Subclass,
    "a tensor of a subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "a Tensor, the class": lambda: torch.Tensor,
    "a Function, the class": lambda: Function,
    "an enum": lambda: Number.ONE,
    "a dataclass": Data,
    "a named tuple": lambda: collections.namedtuple("Pair", "one two")(1, torch.ones(1)),
    "slots": Slots,
    "a module of Python": lambda: operator,
    "a module that raises": module_of_raising,
    "attributes that raise": Raises,
    "a class without a module": Nameless,
    "equal by a tensor": Equal,
    "a mock": unittest.mock.Mock,
    "a magic mock": unittest.mock.MagicMock,
    "a mock of a tensor": lambda: unittest.mock.Mock(spec=torch.Tensor),
    "a number equal by a tensor": lambda: EqualNumber(1),
    "a dead reference": lambda: weakref.ref(Called()),
    "a lock": threading.Lock,
    "a pattern": lambda: re.compile("a"),
    "a generic type": lambda: list[int],
    "code": lambda: times_two.__code__,
    "a mapping proxy": lambda: vars(Called),
    "a simple namespace": lambda: types.SimpleNamespace(one=torch.tanh),
    **RAISING,
}
"""What code may name or hold without calling it."""
