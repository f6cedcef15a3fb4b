"""Starting unmodified scripts with accelerate's launcher: its config files with a section of ours.

The settings reach the processes as environment variables. A variable that is set takes precedence over the file.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

import hf_offload
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.environment import PARENT_VARIABLE, settings_with, variable, variables_for
from hf_offload.settings.shown import cropped, listed, nearest, shown
from hf_offload.settings.text_files import is_file, parse_json, read_text, reason_of
from hf_offload.settings.values import expand
from hf_offload.settings.yaml_text import dump_yaml, parse_yaml

if TYPE_CHECKING:
    import argparse

logger = logging.getLogger(__name__)

SECTION = "hf_offload_config"
_RUN = "hf_offload.run"
_SHIPPED = Path(hf_offload.__file__).resolve().parent / "launch_configs"


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the config files that come with the package."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def default_config() -> Path:
    """Where ``hf-offload config`` writes: next to accelerate's own default file."""
    from accelerate.commands.config import default_config_file

    return Path(default_config_file).with_name("hf_offload_config.yaml")


def find_config(name: str) -> Path:
    """A config file, from its path or the name of a shipped one.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if there is none.
    """
    path, shipped = expand("config file", name), shipped_configs()
    if is_file(path):
        return path
    if name in shipped:
        return shipped[name]
    raise OffloadConfigError(
        f"There is no config file {shown(name)}: no such file, and no shipped one of that name.{nearest(name, shipped)} "
        f"Shipped: {listed(shipped, name)}."
    )


def read_config(path: Path) -> dict[str, Any]:
    """A config file of accelerate, YAML or JSON, as accelerate reads it; our section is read as a recipe is.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if it cannot be read.
    """
    text = read_text(path, "The config file")
    is_json = path.suffix == ".json"
    config = parse_json(text, f"The config file {path}") if is_json else parse_yaml(text, str(path))
    if not isinstance(config, dict):
        raise OffloadConfigError(f"The config file {path} is not a mapping of settings.")
    section = {SECTION: config[SECTION]} if SECTION in config else {}
    try:
        return config if is_json else {**yaml.safe_load(text), **section}
    except (ValueError, yaml.YAMLError) as error:  # such as a date that is none
        raise OffloadConfigError(f"The config file {path} cannot be read: {cropped(str(error))}.") from error


def take_section(config: dict[str, Any], where: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Remove our section from accelerate's ``config``; returns it as variables, without those that are set already.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for unknown keys and wrong values.
    """
    section = config.pop(SECTION, None)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise OffloadConfigError(f"{where}: {SECTION} is not a mapping of settings, such as `tier: ssd`.")
    _, found = settings_with(section, f"{where}, section {SECTION}", environ, environment_first=True)
    for field in section.keys() & found.keys():
        if variables_for({field: section[field]}) != variables_for({field: found[field]}):
            logger.warning(
                "%s=%s is used, and not %s=%s of %s.",
                variable(field),
                cropped(str(found[field])),
                field,
                cropped(str(section[field])),
                where,
            )
    return variables_for({field: value for field, value in section.items() if field not in found})


def launch(arguments: Sequence[str]) -> None:
    """What ``accelerate launch`` does with ``arguments``, with the script running under :mod:`hf_offload.run`.

    Raises :class:`~hf_offload.errors.OffloadConfigError` before any process is started, and
    :class:`subprocess.CalledProcessError` or whatever accelerate raises if one fails.
    """
    import torch
    from accelerate.commands.launch import launch_command_parser

    from hf_offload.allocator import environment_with
    from hf_offload.settings.environment import ALLOCATOR_VARIABLE

    if not arguments:
        raise OffloadConfigError(
            "There is nothing to run: name a script, as in `hf-offload launch train.py --epochs 3`."
        )
    parser = launch_command_parser()
    parser.error = _refuse_option  # type: ignore[method-assign]  # which prints all options of accelerate
    chosen = parser.parse_args(list(arguments))
    if chosen.no_python:
        raise OffloadConfigError("--no_python starts a program that is not Python, which cannot be offloaded: drop it.")
    if not chosen.module and not Path(chosen.training_script).is_file():
        raise OffloadConfigError(f"hf-offload launch: no such file: {chosen.training_script}")
    if not (chosen.module and chosen.training_script == _RUN):
        script = ["-m", chosen.training_script] if chosen.module else [chosen.training_script]
        chosen.training_script_args = [*script, *chosen.training_script_args]
        chosen.training_script, chosen.module = _RUN, True

    path = _config_of(chosen)
    config = None if path is None else read_config(path)
    variables = {} if config is None else take_section(config, str(path))
    # Wrong settings are reported once, before any process starts.
    settings_with({}, "environment", os.environ | variables)
    os.environ.update(variables | {PARENT_VARIABLE: "1"})
    if not torch.accelerator.is_available() and not os.environ.get(ALLOCATOR_VARIABLE):
        os.environ.update(environment_with("auto"))
    if config is None:
        _launch(chosen, "the options")
        return
    with _file_with(dump_yaml(config)) as chosen.config_file:
        _launch(chosen, str(path))


def _config_of(chosen: "argparse.Namespace") -> Path | None:
    """The config file that is named, or else the one that ``hf-offload config`` wrote, or else accelerate's."""
    from accelerate.commands.config import default_config_file

    if chosen.config_file:
        return find_config(chosen.config_file)
    defaults = [default_config(), *([] if chosen.cpu else [Path(default_config_file)])]  # as accelerate does
    return next((path for path in defaults if path.is_file()), None)


def _refuse_option(message: str) -> NoReturn:
    raise OffloadConfigError(f"hf-offload launch: {message} (`accelerate launch --help` lists all options)")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for what accelerate refuses of a config file."""
    from accelerate.commands.config.config_args import load_config_from_file

    with _file_with(dump_yaml(config)) as file, _refusals(where, file):
        load_config_from_file(file)


@contextlib.contextmanager
def _refusals(where: str, file: str) -> Iterator[None]:
    """What accelerate raises about ``file``, a copy of what the user calls ``where``, is a configuration error."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError) as error:
        raise OffloadConfigError(f"accelerate refuses {where}: {reason_of(error).replace(file, where)}") from error


def _launch(chosen: "argparse.Namespace", where: str) -> None:
    from accelerate.commands.launch import launch_command

    # On a TPU the script itself runs in this process.
    with contextlib.nullcontext() if getattr(chosen, "tpu", False) else _refusals(where, str(chosen.config_file)):
        launch_command(chosen)


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[str]:
    """A file for this process; where the system has such, one without a name, which a kill cannot leave behind."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile("w", prefix="hf_offload-", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            yield file.name
        return
    with os.fdopen(os.memfd_create("hf_offload.yaml"), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
