"""The one reader and the one writer of YAML: version 1.2, core schema, one document, no aliases.

PyYAML follows YAML 1.1, where ``no`` is false, ``010`` is 8, ``1:30`` is 90, ``5e-4`` is text and ``2001-01-01`` a date. Its
safe loader is kept, with the core schema in place of its own resolvers and constructors.
"""

import re
from typing import Any

import yaml

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import LONGEST, cropped, shown

DEEPEST = 50
"""Most levels of lists and mappings."""

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"""^(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_SCHEMA = (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
)


def parse_yaml(text: str, where: str) -> Any:
    """The content of ``text``. Raises :class:`~hf_offload.errors.OffloadConfigError` that names ``where`` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = cropped(str(getattr(error, "problem", None) or error), 2 * LONGEST)
        raise OffloadConfigError(f"{cropped(where)}{place}: not valid YAML: {problem}.") from error


def dump_yaml(content: Any) -> str:
    """Text that :func:`parse_yaml`, and any reader of YAML 1.1, reads back as ``content``."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """The core schema; keys are text, and none is given twice."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _problem(f"more than {DEEPEST} levels of lists and mappings", self.peek_event())
        if self.check_event(yaml.AliasEvent):  # a few lines of them stand for billions of values
            raise _problem("an alias: write out what it stands for, or name a layer under base:", self.peek_event())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            wrong = "is not text" if not isinstance(key, str) else "is given twice" if key in seen else None
            if key == "<<" and key_node.style is None:
                wrong = "merges mappings in YAML 1.1 only: write out what they share, or name a layer under base:"
            if wrong:
                raise _problem(f"the key {shown(key)} {wrong}", key_node)
            seen.add(key)
        # Not the safe loader's, which looks for keys that merge.
        return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep=deep)


def _problem(message: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, place.start_mark)


def _scalar(loader: Any, node: Any, pattern: re.Pattern[str], kind: str) -> str:
    text = loader.construct_scalar(node)
    if not pattern.match(text):
        raise _problem(f"{shown(text)} is not of type {kind}", node)
    return str(text)


def _null(loader: Any, node: Any) -> None:
    _scalar(loader, node, _NULL, "null")


def _bool(loader: Any, node: Any) -> bool:
    return _scalar(loader, node, _BOOL, "bool").lower() == "true"


def _int(loader: Any, node: Any) -> int:
    text = _scalar(loader, node, _INT, "int")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        return int(text[2:] if base != 10 else text, base)
    except ValueError:  # more digits than Python converts
        raise _problem(f"a number of {len(text)} digits", node) from None


def _float(loader: Any, node: Any) -> float:
    text = _scalar(loader, node, re.compile(f"{_FLOAT.pattern}|{_INT.pattern}", re.VERBOSE), "float").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _undefined(_loader: Any, node: Any) -> Any:
    raise _problem(f"the tag {cropped(str(node.tag))} is not part of YAML's core schema", node)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 takes for something else, and writes out what is shared."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


_Loader.yaml_implicit_resolvers = {}
_CONSTRUCTORS: dict[str | None, Any] = {
    **{f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"] for kind in ("str", "seq", "map")},
    f"{_TAG}null": _null,
    f"{_TAG}bool": _bool,
    f"{_TAG}int": _int,
    f"{_TAG}float": _float,
    None: _undefined,
}
_Loader.yaml_constructors = _CONSTRUCTORS
for _kind, _pattern, _first in _SCHEMA:
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, _first)
    _Dumper.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, _first)
