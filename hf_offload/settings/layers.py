"""Layers of recipes: a file names others under ``base``, and contains only what differs from them.

``base: [llama/_family, llama/_8b]`` merges these files in that order, and then the file's own keys. Mappings are merged key
by key, everything else is replaced. A ``null`` restores the default. A layer may have a ``base`` of its own, and whole
recipes are layers, too; files whose name begins with an underscore are nothing but layers.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors, joined, nearest
from hf_offload.settings.recipe_files import layer_names, read_yaml, recipe_names, recipe_roots, shipped_name
from hf_offload.settings.recipe_meta import META
from hf_offload.settings.shown import cropped, listed, shown
from hf_offload.settings.text_files import is_file
from hf_offload.settings.values import expand

BASE = "base"
REPLACED_WHOLE = (("model", "shape"),)
"""Mappings that are one fact: half of one model's shape in another's is the shape of no model."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """Files that were merged.

    Attributes:
        tree: Their merged content, without ``base``.
        files: In the order in which they were merged; the last one is the recipe itself.
        origins: Section and key (or a section alone) -> the file that set it last.
    """

    tree: dict[str, Any]
    files: tuple[Path, ...]
    origins: Mapping[tuple[str, ...], Path]

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Errors about a key that another layer than the recipe itself has set say which one."""
        try:
            yield
        except OffloadConfigError as error:
            raise joined("recipe", [self._located(one) for one in error.problems or (str(error),)]) from error

    def other_layer(self, section: str) -> str | None:
        """The layer that has brought ``section`` in, None if the recipe itself did."""
        file = self.origins.get((section,), self.files[-1])
        return None if file == self.files[-1] else shipped_name(file) or str(file)

    def _located(self, problem: str) -> str:
        """``problem``, which begins with its section, or is about a memory mode, with the layer of the first key in it."""
        section, *words = re.findall(r"\w+", re.split(r" Did you mean | Known: ", problem)[0])
        section = "memory" if section == "memory_mode" else section
        key = next((word for word in words if (section, word) in self.origins), "")
        file = self.origins.get((section, key), self.files[-1])
        if file == self.files[-1]:
            return problem
        return f"{problem} ({key} is set in the layer {shipped_name(file) or file}.)"


def read_layers(path: Path) -> Layers:
    """The file of a recipe, merged with the layers it names.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for layers that are missing, that name each other in a circle, or
    that are not mappings; for all of them at once.
    """
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], Path] = {}
    files: list[Path] = []
    _read(path, (), tree, origins, files)
    return Layers(tree, tuple(files), origins)


def bases_of(path: Path, content: Mapping[str, Any]) -> list[Path]:
    """The files that ``content`` of the file ``path`` names as its layers. Raises as :func:`read_layers` does."""
    named = content.get(BASE)
    names = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise OffloadConfigError(
            f"{path}: {BASE}={shown(named)} is not a list of layers, such as [llama/_family, llama/_8b]."
        )
    found: list[Path] = []
    with collect_errors(f"layers of {path}") as check:
        for name in names:
            with check:
                found.append(_find_layer(name, path))
    return found


def drop_nulls(tree: dict[str, Any]) -> None:
    """Take out sections and settings that are ``null``: their defaults hold. Values inside of settings stay as they are."""
    for section, content in list(tree.items()):
        if content is None:
            del tree[section]
        elif isinstance(content, dict):
            tree[section] = {key: value for key, value in content.items() if value is not None}


def _find_layer(name: str, user: Path) -> Path:
    """A layer: next to the file that names it, or among the shipped ones."""
    ending = "" if name.endswith((".yaml", ".yml")) else ".yaml"
    for folder in (user.parent, *recipe_roots()):
        found = folder / expand(f"{cropped(str(user))}: {BASE}", f"{name}{ending}")
        if is_file(found) and found.resolve() != user.resolve():
            return found
    beside = (path.stem for path in user.parent.glob("*.yaml") if path != user)
    known = [*beside, *layer_names(), *recipe_names()]
    raise OffloadConfigError(
        f"{user}: there is no layer {shown(name)}: no such file next to it, and no shipped one of that name."
        f"{nearest(name, known)} Shipped layers: {listed(layer_names(), name)}."
    )


def _read(
    path: Path,
    above: tuple[Path, ...],
    tree: dict[str, Any],
    origins: dict[tuple[str, ...], Path],
    files: list[Path],
) -> None:
    if path.resolve() in [file.resolve() for file in above]:
        chain = " -> ".join(str(shipped_name(file) or file) for file in (*above, path))
        raise OffloadConfigError(f"Layers name each other in a circle: {chain}. Take one of them out of its {BASE}.")
    content = read_yaml(path)
    if not isinstance(content, dict):
        what = "no layer of a recipe" if above else "not a recipe"
        raise OffloadConfigError(f"{path} is {what}: it needs sections, such as model: and training:.")
    with collect_errors(f"layers of {path}") as check:
        bases: list[Path] = []
        with check:
            bases = bases_of(path, content)
        for base in bases:
            with check:
                _read(base, (*above, path), tree, origins, files)
    left_out = (BASE, META) if above else (BASE,)
    sections = {key: value for key, value in content.items() if key not in left_out}
    _merge(sections, tree, origins, path, ())
    files.append(path)


def _merge(
    upper: Mapping[str, Any],
    below: dict[str, Any],
    origins: dict[tuple[str, ...], Path],
    file: Path,
    place: tuple[str, ...],
) -> None:
    for key, value in upper.items():
        here = (*place, key)
        known = below.get(key)
        if isinstance(value, dict) and isinstance(known, dict) and here not in REPLACED_WHOLE:
            _merge(value, known, origins, file, here)
        elif value is None and known is not None:
            del below[key]
        else:
            below[key] = copy.deepcopy(value)
            if isinstance(value, dict) and not place:
                origins.update({(key, inner): file for inner in value})
        if len(here) <= 2:
            origins[here] = file
