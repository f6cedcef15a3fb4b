"""What of a training's time is none of its compute, and what a byte that moves takes of it."""

import dataclasses
from collections.abc import Mapping

from hf_offload.plan.hardware import Hardware
from hf_offload.plan.holding import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS
from hf_offload.planning.model_state import ModelState
from hf_offload.planning.observed import ObservedEngine

_KINDS = (ACTIVATIONS, WEIGHTS, STATE, GRADIENTS)


class Overhead:
    """The time in which the threads of one training do not compute.

    A host that computes itself does nothing else while it prepares what moves: plans count on that for every byte. An
    accelerator's kernels run meanwhile, and wait for bytes alone.
    """

    def __init__(self, engine: ObservedEngine, model_state: ModelState, device: str):
        self._engine = engine
        self._model_state = model_state
        self._on_host = device == "cpu"
        self.begin_step()
        # Kind -> seconds and bytes, of usual steps and of those that were measured.
        self._usual: dict[str, tuple[float, int]] = {}
        self._measured: dict[str, tuple[float, int]] = {}

    def seconds(self) -> float:
        """All of it so far."""
        if self._on_host:
            return self._model_state.handled_s
        return self._engine.waited_s() + self._model_state.waited_s

    def begin_step(self) -> None:
        """A step begins: what a new plan has moved since the last one ended belongs to neither."""
        self._before = self._handled()

    def end_step(self, is_measured: bool) -> None:
        """A step has ended. While one is measured, all takes longer."""
        now, before = self._handled(), self._before
        self._before = now
        found = self._measured if is_measured else self._usual
        for kind, handled in now.items():
            found[kind] = _added(found.get(kind, (0.0, 0)), handled, before.get(kind, (0.0, 0)))

    def on(self, hardware: Hardware) -> Hardware:
        """``hardware`` with it, and with the rates that its tiers have reached."""
        store, load = dict(hardware.store_bytes_per_s), dict(hardware.load_bytes_per_s)
        for tier, reached in self._engine.bandwidth().items():
            for rates, rate in zip((store, load), reached, strict=True):
                if rate > 0 and tier in rates:
                    rates[tier] = dataclasses.replace(rates[tier], value=rate, source="measured")
        return dataclasses.replace(hardware, store_bytes_per_s=store, load_bytes_per_s=load, busy_s=self.busy_s)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds a byte, by kind: of usual steps, but no more than of those that were measured, or a plan that lets nothing
        of a kind move after a step in which the machine was slow would never find out. What has not moved yet is taken to be
        like the others.
        """
        found: dict[str, float] = {}
        all_s, all_bytes = 0.0, 0
        for kind in _KINDS:
            both = [steps.get(kind, (0.0, 0)) for steps in (self._usual, self._measured)]
            each = [(seconds / nbytes, seconds, nbytes) for seconds, nbytes in both if nbytes]
            if each:
                a_byte_s, seconds, nbytes = min(each)
                found[kind] = max(0.0, a_byte_s)
                all_s, all_bytes = all_s + seconds, all_bytes + nbytes
        others = max(0.0, all_s / max(1, all_bytes))
        return {kind: found.get(kind, others) for kind in _KINDS}

    def _handled(self) -> Mapping[str, tuple[float, int]]:
        if not self._on_host:
            return {}
        return {ACTIVATIONS: self._engine.handled(), **self._model_state.handled()}


def _added(found: tuple[float, int], now: tuple[float, int], before: tuple[float, int]) -> tuple[float, int]:
    return found[0] + now[0] - before[0], found[1] + now[1] - before[1]
