"""Files of recipes: where they are found, how their YAML is read, and changes to it from the command line."""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

import hf_offload
from hf_offload.errors import OffloadConfigError


def recipe_roots() -> list[Path]:
    """The folders that hold shipped recipes: in an installed package, or in a checkout."""
    package = Path(hf_offload.__file__).resolve().parent
    roots = [package / "_recipes"]
    if (package.parent / "pyproject.toml").is_file():
        roots.append(package.parent / "recipes")
    return [root for root in roots if root.is_dir()]


def recipe_names() -> list[str]:
    """Names of all shipped recipes, such as ``gpt/demo``."""
    return [name for name in _shipped_names() if not is_layer(name)]


def layer_names() -> list[str]:
    """Names of the shipped files that recipes are made of, such as ``llama/_8b``: no recipes themselves."""
    return [name for name in _shipped_names() if is_layer(name)]


def is_layer(name: str) -> bool:
    """Whether the name of a shipped file, or that of any file, says that it is only a layer: with an underscore in front."""
    return any(part.startswith("_") for part in name.split("/"))


def shipped_name(path: Path) -> str | None:
    """The name of a shipped recipe or layer, from its file; None for other files."""
    for root in recipe_roots():
        if path.resolve().is_relative_to(root.resolve()):
            return path.resolve().relative_to(root.resolve()).with_suffix("").as_posix()
    return None


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, from its path or its shipped name.

    Raises :class:`OffloadConfigError` with the nearest names if there is none, and for a layer.
    """
    path = Path(name).expanduser()
    found = path if path.is_file() else None
    if found is None and path.suffix not in (".yaml", ".yml"):
        shipped = (root / f"{name}.yaml" for root in recipe_roots())
        found = next((file for file in shipped if file.is_file()), None)
    if found is None:
        names = recipe_names()
        likely = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, likely))}?" if likely else ""
        raise OffloadConfigError(
            f"There is no recipe {str(name)!r}: no such file, and no shipped recipe of that name.{hint} "
            f"Shipped: {', '.join(names) or 'none'}."
        )
    if is_layer(shipped_name(found) or found.name):
        raise OffloadConfigError(
            f"{str(name)!r} is a layer that recipes are made of, and no recipe: name it under base: in a recipe of your own."
        )
    return found


def _shipped_names() -> list[str]:
    found = [path.relative_to(root) for root in recipe_roots() for path in root.rglob("*.yaml")]
    return sorted({path.with_suffix("").as_posix() for path in found})


# ---------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """YAML 1.2's reading of plain words, as people expect it.

    PyYAML follows YAML 1.1, where ``no`` and ``off`` are false (``save_strategy: no``, ``verify: off``) and ``5e-4`` is
    a string; and it lets a key that is given twice win silently.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            wrong = "is not text" if not isinstance(key, str) else "is given twice" if key in seen else None
            if wrong:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} {wrong}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_BOOL_PATTERN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT_PATTERN = re.compile(
    r"""^(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader`, and any reader of YAML 1.1, read back as it was: text that either takes for something
    else is quoted.
    """

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_BOOL, _BOOL_PATTERN, list("tTfF"))
    _kind.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("-+0123456789."))


def dump_yaml(content: Any) -> str:
    """Text that :func:`parse_yaml` reads back as ``content``."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse_yaml(text: str, where: str) -> Any:
    """What ``text`` says. Raises :class:`OffloadConfigError` that names ``where`` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise OffloadConfigError(f"{where}{place}: not valid YAML: {problem}.") from error


def read_yaml(path: Path) -> Any:
    """What the file of a recipe says, whatever it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OffloadConfigError(f"The recipe {path} cannot be read: {error}.") from error
    return parse_yaml(text, str(path))


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Change ``tree`` as ``override``, such as ``training.max_steps=3``, says; ``null`` takes away what is there."""
    key, equals, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise OffloadConfigError(f"{override!r} is no override: write section.key=value, such as training.max_steps=3.")
    where = tree
    for depth, part in enumerate(parents):
        if not isinstance(where.get(part), dict):
            if where.get(part) is not None:
                raise OffloadConfigError(f"{override!r}: {'.'.join(parents[: depth + 1])} is not a mapping.")
            where[part] = {}
        where = where[part]
    value = parse_yaml(text, repr(override))
    if value is None and where.get(last) is not None:
        del where[last]
    else:
        where[last] = value
