"""Names and types of transformers' settings, read from its source: importing it takes seconds, since it imports torch.

Where the source is not as expected, results are ``None`` or empty, and the library itself checks later.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.text_files import read_text

_MAPPINGS = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
_BASE = "PreTrainedConfig"


@functools.cache
def training_fields() -> Mapping[str, frozenset[str]]:
    """Field of ``TrainingArguments`` -> names of the types it takes: ``{"max_steps": {"int"}, ...}``."""
    (found,) = _classes("training_args.py", "TrainingArguments") or (None,)
    fields = {}
    for line in found.body if found is not None else ():
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_init_field(line):
            fields[line.target.id] = frozenset(_types(line.annotation))
    return fields


@functools.cache
def enum_values(name: str) -> tuple[str, ...]:
    """The words that an enumeration of training arguments has, such as ``SaveStrategy``; none if there is none."""
    for file in ("training_args.py", "trainer_utils.py", "debug_utils.py"):
        for found in _classes(file, name):
            words = [line.value for line in found.body if isinstance(line, ast.Assign)]
            return tuple(word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str))
    return ()


@functools.cache
def reporters() -> tuple[str, ...]:
    """The names that ``report_to`` takes."""
    return tuple(_strings_of("integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK", keys_only=True))


@functools.cache
def architectures(task: str | None = None) -> tuple[str, ...]:
    """Model types that there are, or that there are for a task."""
    if task in _MAPPINGS:
        return tuple(_strings_of("models/auto/modeling_auto.py", _MAPPINGS[task], keys_only=True))
    return tuple(dict.fromkeys(_config_classes()))


@functools.cache
def config_fields(architecture: str) -> frozenset[str] | None:
    """Fields that the configuration of a model type may have, possibly a few more; None if they cannot be determined."""
    special = dict(_pairs_of("SPECIAL_MODEL_TYPE_TO_MODULE_NAME"))
    folder = special.get(architecture, architecture.replace("-", "_"))
    name = _config_classes().get(architecture)
    file = f"models/{folder}/configuration_{folder}.py"
    fields: set[str] = {"model_type"}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        (found,) = _classes(file, name or "") or (None,)
        if found is None:
            return None
        fields |= _names_in(found)
        bases = [base.id if isinstance(base, ast.Name) else "" for base in found.bases]
        waiting += [base for base in bases if base != _BASE]
    base = _tree("configuration_utils.py")
    return None if base is None else frozenset(fields | _names_in(base))


def _config_classes() -> dict[str, str]:
    return dict(_pairs_of("CONFIG_MAPPING_NAMES"))


def _pairs_of(name: str) -> Iterator[tuple[str, str]]:
    for file in ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"):
        words = list(_strings_of(file, name, keys_only=False))
        yield from zip(words[::2], words[1::2], strict=False)


def _strings_of(file: str, name: str, *, keys_only: bool) -> Iterator[str]:
    """Strings of the literals that the variable ``name`` is made of or updated with, in their order."""
    tree = _tree(file)
    for line in tree.body if tree is not None else ():
        value: Any = None
        if isinstance(line, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in line.targets):
            value = line.value
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
            value = line.value if ast.unparse(line.value.func) == f"{name}.update" else None
        for node in ast.walk(value) if value is not None else ():
            pairs: list[tuple[Any, Any]] = []
            if isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
                pairs = [(node.elts[0], node.elts[1])]
            for pair in pairs:
                for word in pair[:1] if keys_only else pair:
                    yield str(word.value) if isinstance(word, ast.Constant) else ""


def _names_in(tree: ast.AST) -> set[str]:
    """Every name that may be a field: what is annotated, set on ``self``, an argument, a property or a string."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


def _is_init_field(line: ast.AnnAssign) -> bool:
    keywords = line.value.keywords if isinstance(line.value, ast.Call) else []
    hidden = any(one.arg == "init" and ast.unparse(one.value) == "False" for one in keywords)
    return not hidden and "ClassVar" not in ast.unparse(line.annotation)


def _types(hint: ast.expr) -> Iterator[str]:
    if isinstance(hint, ast.BinOp):
        yield from _types(hint.left)
        yield from _types(hint.right)
    elif isinstance(hint, ast.Subscript):
        outer, inner = ast.unparse(hint.value), hint.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer in ("Union", "Optional"):
            for part in parts:
                yield from _types(part)
            if outer == "Optional":
                yield "None"
        elif outer == "Literal":
            yield from {type(part.value).__name__ for part in parts if isinstance(part, ast.Constant)}
        else:
            yield outer
    elif isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        yield from _types(ast.parse(hint.value, mode="eval").body)
    else:
        yield ast.unparse(hint)


def _classes(file: str, name: str) -> list[ast.ClassDef]:
    tree = _tree(file)
    return [line for line in (tree.body if tree else ()) if isinstance(line, ast.ClassDef) and line.name == name][:1]


@functools.cache
def _tree(file: str) -> ast.Module | None:
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            return ast.parse(read_text(Path(folder) / file, "The module"))
        except (OffloadConfigError, SyntaxError):
            continue
    return None
