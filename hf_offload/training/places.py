"""Where a run writes and what it resumes from: checks before anything is loaded. Imports no library."""

import re
from collections.abc import Iterable
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.outputs import check_output_file, check_output_folder
from hf_offload.settings.recipes import RANDOM_TOKENS, Recipe
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import shown
from hf_offload.settings.text_files import is_folder, reason_of
from hf_offload.storage.disk_io import check_can_hold_files

_CHECKPOINT = re.compile(r"checkpoint-\d+")


def check_places(recipe: Recipe, *, report: Path | None = None, save: bool = True, resume: bool = False) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for files and folders that the run cannot write, a directory that
    cannot hold activations, and where there is no checkpoint to resume.
    """
    with collect_errors("files and folders of the run") as check:
        if report is not None:
            with check:
                check_output_file(report, "--report", ".json")
        prepares_data, own_cache = recipe.data.source != RANDOM_TOKENS, bool(recipe.data.cache_dir)
        with check:
            if save:
                check_output_folder(recipe.output_dir, "training.output_dir")
            if prepares_data and not own_cache:  # it lies in the output directory
                check_output_folder(recipe.cache_dir, "training.output_dir")
        with check:
            if prepares_data and own_cache:
                check_output_folder(recipe.cache_dir, "data.cache_dir")
        with check:
            check_directories([recipe.offload])
        with check:
            if resume:
                check_checkpoints(recipe)


def check_directories(configs: Iterable[OffloadConfig]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for directories that cannot hold activations."""
    with collect_errors("directories") as check:
        for directory in dict.fromkeys(directory for config in configs for directory in config.directories):
            with check:
                check_can_hold_files(directory)


def check_checkpoints(recipe: Recipe) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` unless there is a checkpoint, complete or not."""
    folder = recipe.output_dir
    try:
        found = is_folder(folder) and any(_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())
    except OSError as error:
        raise OffloadConfigError(
            f"training.output_dir={shown(str(folder))} cannot be read: {reason_of(error)}."
        ) from error
    if not found:
        raise nothing_to_resume(folder)


def nothing_to_resume(folder: Path) -> OffloadConfigError:
    """The error for a run that cannot resume from anything in ``folder``."""
    return OffloadConfigError(
        f"There is no complete checkpoint in {folder} to go on from: start without --resume. Checkpoints are written as "
        "training.save_strategy and training.save_steps say."
    )
