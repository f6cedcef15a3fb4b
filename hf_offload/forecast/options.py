"""What a workload may be asked for, checked without torch, which takes seconds to import."""

from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.recipes import DTYPES, TASKS
from hf_offload.settings.values import optional, whole

AUTOCAST = ("no", "bf16", "fp16")


def check_options(
    *,
    batch: int | None = None,
    sequence: int | None = None,
    image_size: int | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    task: str | None = None,
) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for all values that no workload has.

    A ``task`` with a capital letter may be a class of transformers, which only that library knows.
    """
    with collect_errors("options") as check:
        for name, value in (("batch", batch), ("sequence", sequence), ("image_size", image_size)):
            with check:
                optional(whole(1))(name, value)
        for name, word, allowed in (("dtype", dtype, DTYPES), ("autocast", autocast, AUTOCAST)):
            with check:
                if word is not None:
                    choose(name, word, allowed)
        with check:
            if task is not None and not task[:1].isupper():
                choose("task", task, TASKS)
