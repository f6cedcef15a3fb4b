"""A training whose steps depend on their number alone, in memory, or with something of it on a tier."""

import torch

from hf_offload import OffloadConfig, attach
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.train import copied

SMALLEST = 512  # bytes: of the tiny model, weights of layers leave memory and biases do not
STEPS = 3

STREAMED = {"optimizer": "ssd", "backwards": 2, "clips": True}
PARKED = {"params": "ssd"}


class Training:
    """``folder`` is None for one in memory; ``settings`` are those of the config otherwise. With a tier of activations,
    weights and state stay in memory. ``prepare`` is called with a model that is about to be offloaded.
    """

    def __init__(
        self, folder, backwards=1, clips=False, in_backward=False, looks=False, loads=False,
        evaluates=False, make=torch.optim.AdamW, prepare=None, **settings,
    ):  # fmt: skip
        self.backwards, self.clips, self.looks, self.loads = backwards, clips, looks, loads
        self.evaluates = evaluates
        self.model = tiny_model("gpt2")
        self.batch = tiny_batch("gpt2")
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.session = None
        self._moves_activations = "tier" in settings
        if folder is None:
            return
        if prepare is not None:
            prepare(self.model)
        files = {"directory": folder} if {"ssd", "auto"} & set(map(str, settings.values())) else {}
        config = {"tier": "none", "min_bytes": SMALLEST, "update_in_backward": in_backward, **files, **settings}
        self.session = attach(self.model, OffloadConfig(**config))
        if self._moves_activations:
            return
        if self.session.residency is not None:
            self.session.residency.limit_bytes = 1
        self.session.prepare_optimizer(self.optimizer)
        self.session.defer_updates()

    def step(self, number):
        self.optimizer.zero_grad()
        for micro in range(self.backwards):
            torch.manual_seed(100 * number + micro)  # of dropout
            self.model(**self.batch).loss.backward()
        if self.clips:
            if self.session is None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            else:
                self.session.clip_grad_norm_(0.1)
        self.optimizer.step()
        if self.looks:
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
        if self.loads:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if self.evaluates:
            try:
                with torch.no_grad():
                    self.model.eval()(**self.batch)
            finally:
                self.model.train()
        if self._moves_activations and self.session is not None:
            self.session.end_step()

    def run(self, first=0):
        """The steps from ``first`` on, and the values after them."""
        for number in range(first, STEPS):
            self.step(number)
        return self.values()

    def values(self):
        return copied(self.model.state_dict()), copied(self.optimizer.state_dict())

    def load(self, values):
        weights, state = values
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copied(state))


def values_in_memory(training=Training):
    """The values of a training in memory before the first step and after each one."""
    return values_after_steps(training(None))


def values_after_steps(training):
    found = [training.values()]
    for number in range(STEPS):
        training.step(number)
        found.append(training.values())
    return found
