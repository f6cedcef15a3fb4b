"""Nothing here may reach a network or depend on how many cores a machine has."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Before transformers and datasets are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.pop("HF_OFFLOAD_DISABLE", None)
# What the machine was measured to do is kept, but not among the user's own files.
_CACHE = tempfile.TemporaryDirectory(prefix="hf_offload-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
# Test processes that run side by side share the cores: more threads than cores wait for each other.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
# Processes that tests start find the package, and from any directory the same one.
_ROOT = str(Path(__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))

# A test suite that was started in the background ignores Ctrl-C, and so would the processes that tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
import transformers  # noqa: F401  its log handler keeps the stderr of its import, which must outlive a single test

from tests.helpers.machines import machine
from tests.helpers.tiny_recipe import write_tiny_recipe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported here stays: no garbage collection searches it now."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_searched() -> None:
    """What has been imported by now stays: no garbage collection of this file searches it. Each training begins with one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Snapshot processes outlive their trainings, and none its tests."""
    from tests.helpers.snapshot_processes import end, snapshot_processes

    end(snapshot_processes("XDG_CACHE_HOME", _CACHE.name))


@pytest.fixture
def tiny_recipe(tmp_path, monkeypatch):
    """A recipe that trains in a second, in an empty current directory; everything it writes stays there."""
    monkeypatch.chdir(tmp_path)
    return write_tiny_recipe(tmp_path)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """One that the benchmark trains on random tokens, in an empty current directory."""
    from tests.helpers.bench_recipes import RANDOM_RECIPE

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(RANDOM_RECIPE)
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as those of tests only get slower when several threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def machine_with_drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Takes the machine for one whose drive moves so many bytes a second, however busy it is, and spares its measurement."""

    def take(bytes_per_s: float) -> None:
        hardware = machine(bytes_per_s)
        monkeypatch.setattr(
            "hf_offload.planning.ranks.measure_hardware", lambda directories, device, **options: hardware
        )
        monkeypatch.setattr("hf_offload.engine.hooks.Engine.bandwidth", lambda engine: {})
        monkeypatch.setattr("hf_offload.planning.step_time.Overhead.busy_s", {})

    return take


@pytest.fixture
def few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts plan for their smallest and their largest other budget alone, of eight."""
    monkeypatch.setattr("hf_offload.forecast.forecast._BUDGETS", 2)


def _modes() -> dict[str, object]:
    """What PyTorch's Python code switches for the whole process; a nesting of autocast keeps casts of weights for ever."""
    torch.autocast_increment_nesting()
    return {
        "autocast's nesting": torch.autocast_decrement_nesting(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
    }


@pytest.fixture(autouse=True)
def modes_left_as_they_were():
    """A mode that one test leaves switched would make another one fail, far away."""
    before = _modes()
    yield
    assert _modes() == before


@pytest.fixture
def no_collections() -> Iterator[None]:
    """No garbage, of earlier tests for one, is collected while a signal can come.

    Much of it leaves weak sets of the standard library, threads for example: functions in Python, where an error that a
    handler raises is discarded.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
