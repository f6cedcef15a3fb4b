"""Models that do not fit into memory, made with their weights on a tier."""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.pretrained.arrivals import Arrivals
from hf_offload.pretrained.errors import loading
from hf_offload.settings.environment import unless_disabled
from hf_offload.settings.schema import OffloadConfig

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""The variable that keeps transformers from reading weights ahead of those that it is at."""


def load_pretrained(
    auto: Any, name_or_path: str | os.PathLike[str], *args: Any, config: OffloadConfig, **kwargs: Any
) -> nn.Module:
    """``auto.from_pretrained(name_or_path, *args, **kwargs)``, with the weights on the tier that ``config.params`` names.

    Each weight goes there before the next ones are read, so the model may be larger than memory. It has the values, dtypes,
    tied weights and buffers that ``from_pretrained`` gives it, whose code it runs. The weights stay on the tier for as long
    as the model lives: :func:`~hf_offload.attach` and the Trainer keep them there, whatever ``params`` says then.

    Args:
        auto: A class with ``from_pretrained``, such as ``AutoModelForCausalLM`` or ``LlamaForCausalLM``.
        name_or_path: Of the checkpoint, as for ``from_pretrained``.
        args: For ``from_pretrained``.
        config: Where weights go: ``params``, ``directory``, ``memory_budget``, ``disk_budget``. Where ``params`` leaves
            them in memory, this is ``from_pretrained``.
        kwargs: For ``from_pretrained``; the model's own configuration is ``model_config`` here. Not ``device_map``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a checkpoint that is damaged, incomplete, of other shapes or
    larger than the room on the drive, and :class:`~hf_offload.errors.StorageError` where weights cannot be written.

    Example::

        config = OffloadConfig(tier="ssd", params="ssd", directory="/nvme", memory_budget="12GiB")
        model = load_pretrained(AutoModelForCausalLM, "meta-llama/Llama-3.1-8B", config=config, dtype="bfloat16")
    """
    _check("load_pretrained", auto, config, "from_pretrained")
    if "model_config" in kwargs:
        kwargs["config"] = kwargs.pop("model_config")
    with loading("load_pretrained", os.fspath(name_or_path)):
        return from_pretrained(auto, name_or_path, *args, offload=config, **kwargs)


def from_pretrained(
    auto: Any, name_or_path: str | os.PathLike[str], *args: Any, offload: OffloadConfig, **kwargs: Any
) -> nn.Module:
    """:func:`load_pretrained`, with the arguments and errors of ``from_pretrained``."""
    offload = unless_disabled(offload)
    if offload.weights_place == "none":
        return auto.from_pretrained(name_or_path, *args, **kwargs)
    _refuse(kwargs)
    with _progress_bar("Loading weights") as report, _one_at_a_time():
        with Arrivals(offload, os.fspath(name_or_path), report) as arrivals:
            made = auto.from_pretrained(name_or_path, *args, **kwargs)
        arrivals.settle(made[0] if isinstance(made, tuple) else made)  # with output_loading_info=True
    return made


def create_from_config(auto: Any, model_config: Any, *, config: OffloadConfig, **kwargs: Any) -> nn.Module:
    """``auto.from_config(model_config, **kwargs)``, with the weights on the tier that ``config.params`` names.

    Each weight is drawn when its module is made, with the bits that ``from_config`` draws after the same seed, and goes to
    the tier when others need its room. Otherwise as :func:`load_pretrained`.

    Args:
        auto: A class with ``from_config``, such as ``AutoModelForCausalLM``, or a model's class, such as ``GPT2LMHeadModel``.
        model_config: Of the model.
        config: Where weights go.
        kwargs: For ``from_config``, such as ``dtype``.
    """
    _check("create_from_config", auto, config, "from_config", "_from_config")
    config = unless_disabled(config)
    make = getattr(auto, "from_config", None) or auto._from_config
    if config.weights_place == "none":
        return make(model_config, **kwargs)
    name = type(model_config).__name__
    with _progress_bar("Drawing weights") as report:
        with Arrivals(config, name, report) as arrivals:
            with _without_memory():
                make(copy.deepcopy(model_config), **kwargs)  # counts what is to come
            made = make(model_config, **kwargs)
        arrivals.settle(made)
    return made


def _check(function: str, auto: Any, config: Any, *methods: str) -> None:
    if not any(hasattr(auto, name) for name in methods):
        raise OffloadConfigError(
            f"{function}: {auto!r} has no {methods[0]}: give a class first, such as AutoModelForCausalLM or LlamaForCausalLM."
        )
    if not isinstance(config, OffloadConfig):
        raise OffloadConfigError(
            f"{function}: config={config!r} is not an OffloadConfig, which says where weights go. The model's own "
            f"configuration is {'model_config' if function == 'load_pretrained' else 'the second argument'}."
        )


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("device_map") is not None:
        raise OffloadConfigError(
            "load_pretrained: device_map would let accelerate move the weights that params moves. Leave it out: weights are "
            "loaded to the tier, and come to the model's device, which model.to() changes, when they are used."
        )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    former = os.environ.get(_ONE_AT_A_TIME)
    os.environ[_ONE_AT_A_TIME] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[_ONE_AT_A_TIME]
        else:
            os.environ[_ONE_AT_A_TIME] = former


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters are made without values, and random numbers are not used up."""
    from transformers import initialization

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        if hasattr(initialization, "meta_device_safe_creation_ops"):
            stack.enter_context(initialization.meta_device_safe_creation_ops())
        yield


@contextlib.contextmanager
def _progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is called with the bytes that have come and those expected. It is shown in terminals only, in place of the
    one that transformers shows for weights.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from transformers.utils import logging

    def without_weights(factory: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("desc") == "Loading weights":
            factory = logging.EmptyTqdm
        return factory(*args, **kwargs) if former is None else former(factory, args, kwargs)

    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    shown = console.is_terminal and logging.is_progress_bar_enabled()
    bar = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not shown)
    task = None

    def report(done: int, expected: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task(description, total=expected)
        bar.update(task, completed=done, total=expected)

    former = logging.set_tqdm_hook(without_weights)
    try:
        yield report
        if task is not None:
            bar.update(task, total=bar.tasks[0].completed)  # a tied weight was expected twice
    finally:
        logging.set_tqdm_hook(former)
        bar.stop()
