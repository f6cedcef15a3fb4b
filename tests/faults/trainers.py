"""A Trainer of a tiny model with checkpoints, in memory or with activations and optimizer state on a drive."""

from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadTrainingArguments
from tests.helpers.tiny_models import ExampleDataset, tiny_model

PLAIN = {
    "max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2,
    "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 3,
    "dataloader_pin_memory": False,
}  # fmt: skip


def trainer_in(folder, offloaded, callbacks=(), **others):
    """One that writes to ``folder``, whose drive is the folder ``tier`` next to it; ``others`` are further arguments."""
    arguments, kind = {**PLAIN, "output_dir": str(folder), **others}, TrainingArguments
    if offloaded:
        tier = folder.parent / "tier"
        tier.mkdir(exist_ok=True)
        arguments = {"offload": "ssd", "offload_optimizer": "ssd", "offload_read_ahead_bytes": "1", **arguments}
        arguments |= {"offload_directory": str(tier), "offload_min_bytes": "0"}
    if offloaded or "memory_mode" in others:
        kind = OffloadTrainingArguments
    data = ExampleDataset("gpt2", 24, seed=1)
    return Trainer(model=tiny_model("gpt2"), args=kind(**arguments), train_dataset=data, callbacks=list(callbacks))


class AfterStep(TrainerCallback):
    """Calls ``do`` with the Trainer's control after the step ``number``."""

    def __init__(self, number, do):
        self._number = number
        self._do = do

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._number:
            self._do(control)
