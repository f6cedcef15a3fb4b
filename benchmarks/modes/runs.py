"""One training run of the benchmark of memory modes: the text, the model, the Trainer, and what is seen of it."""

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError

FOLDER, FILE = "tinyshakespeare", "input.txt"
BATCH, LENGTH = 4, 128
VALIDATION_SHARE = 0.1
VALIDATION_BLOCKS = 64
WARMUP = 0.1
SCHEDULE = "cosine"
WEIGHT_DECAY = 0.01
RECIPE = [BATCH, LENGTH, WARMUP, SCHEDULE, WEIGHT_DECAY]
HEAD = 64
_BYTES = 256
_MULTIPLE = 32


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes as tokens, in blocks: int64 ``[blocks, LENGTH]``. ``digest`` tells one text from another."""

    train: Tensor
    validation: Tensor
    digest: str

    def __len__(self) -> int:
        return len(self.train)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.train[row], "labels": self.train[row]}


def load_text(data_dir: Path) -> Text:
    """The text in ``data_dir``; its end is for validation, of which blocks at equal distances are taken.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if it is not there, or too short.
    """
    file = data_dir / FOLDER / FILE
    if not file.is_file():
        raise OffloadConfigError(
            f"{file} is not there: --data-dir is a folder with a folder {FOLDER}, and in it {FILE}, the text of "
            "karpathy/char-rnn (1.1 MB). Any text of that name will do for a look."
        )
    content = file.read_bytes()
    tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    cut = int((1 - VALIDATION_SHARE) * len(tokens))
    train, validation = (part[: len(part) // LENGTH * LENGTH].view(-1, LENGTH) for part in (tokens[:cut], tokens[cut:]))
    if len(train) < BATCH or not len(validation):
        raise OffloadConfigError(
            f"{file} has {len(content)} bytes, too few for a batch of {BATCH} x {LENGTH} and as much as "
            f"{VALIDATION_SHARE:.0%} for validation: take the whole text."
        )
    chosen = validation[:: max(len(validation) // VALIDATION_BLOCKS, 1)][:VALIDATION_BLOCKS]
    return Text(train, chosen, hashlib.sha256(content).hexdigest()[:16])


@dataclasses.dataclass(frozen=True)
class Run:
    """One training, from the weights of the warm start on (but for the warm start itself).

    Attributes:
        curve: Pairs of step and validation loss (nats a byte), from step 0 on.
        state_bytes: Most that the optimizer's state took after any step.
        gradient_bytes: Most that gradients took at any step's end.
        median_step_s: Without validation; from one run to another it says little.
    """

    mode: str
    rate: float
    seed: int
    steps: int
    curve: Sequence[Sequence[float]]
    state_bytes: int
    gradient_bytes: int
    median_step_s: float

    @property
    def final(self) -> float:
        """Validation loss at the end; infinite where there is none."""
        loss = self.curve[-1][1]
        return loss if math.isfinite(loss) else math.inf


def build_model(layers: int, hidden: int) -> Any:
    """A LLaMA of random weights in float32 for bytes: heads of 64, an MLP of 2.7 times the hidden size."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=_BYTES,
        hidden_size=hidden,
        intermediate_size=round(2.7 * hidden / _MULTIPLE) * _MULTIPLE,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // HEAD, 1),
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_trainer(
    model: Any, text: Text, mode: str, settings: Mapping[str, Any], rate: float, seed: int, steps: int, folder: Path
) -> Any:
    """A Trainer whose arguments differ in nothing but the memory mode, the rate, the seed and the steps."""
    from transformers import PrinterCallback, Trainer, default_data_collator, set_seed

    from hf_offload import OffloadTrainingArguments

    set_seed(seed)  # adapters are drawn as the Trainer is made
    trainer = Trainer(
        model=model,
        args=OffloadTrainingArguments(
            output_dir=str(folder),
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.accelerator.is_available(),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=rate,
            warmup_steps=WARMUP,
            lr_scheduler_type=SCHEDULE,
            weight_decay=WEIGHT_DECAY,
            memory_mode=mode,
            memory_mode_kwargs=json.dumps(settings) if settings else None,
        ),
        train_dataset=text,
        data_collator=default_data_collator,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: Any, text: Text, mode: str, every: int) -> Run:
    """Train to the end, with a look at the validation blocks before it and every ``every`` steps."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            began.append(time.perf_counter())

        def on_optimizer_step(self, *_args: Any, model: Any = None, optimizer: Any = None, **_kwargs: Any) -> None:
            states.append(state_bytes(optimizer))
            gradients.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_kwargs: Any) -> None:
            seconds.append(time.perf_counter() - began[-1])
            step = state.global_step
            if step % every == 0 or step == args.max_steps:
                curve.append((step, validation_loss(model, text)))

    began: list[float] = []
    seconds: list[float] = []
    states: list[int] = []
    gradients: list[int] = []
    curve = [(0, validation_loss(trainer.model, text))]
    trainer.add_callback(Watch())
    trainer.train()
    return Run(
        mode=mode,
        rate=trainer.args.learning_rate,
        seed=trainer.args.seed,
        steps=trainer.args.max_steps,
        curve=curve,
        state_bytes=max(states),
        gradient_bytes=max(gradients),
        median_step_s=statistics.median(seconds),
    )


def state_bytes(optimizer: Any) -> int:
    """Of all tensors in the optimizer's state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return sum(value.nbytes for each in inner.state.values() for value in each.values() if isinstance(value, Tensor))


@torch.no_grad()
def validation_loss(model: Any, text: Text) -> float:
    """Mean over the validation blocks, in nats a byte."""
    model.eval()
    device = next(model.parameters()).device
    losses = [
        model(input_ids=rows, labels=rows).loss.double() * len(rows)
        for rows in text.validation.to(device).split(4 * BATCH)
    ]
    model.train()
    return float(sum(losses) / len(text.validation))
