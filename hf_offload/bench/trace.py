"""A profile of one training step, for Chrome's trace viewer and Perfetto: what ran when, on which thread and stream."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState


class StepTrace(TrainerCallback):
    """Profiles the step that follows ``after`` others and writes it to ``path``."""

    def __init__(self, path: Path, after: int):
        self._path = path
        self._after = after
        self._profile: torch.profiler.profile | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._after and self._profile is None:
            self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._profile.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._profile is None or state.global_step != self._after + 1:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f"{os.getpid()}.{self._path.name}")
        self._profile.export_chrome_trace(str(unfinished))
        unfinished.replace(self._path)
