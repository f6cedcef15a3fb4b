"""Deliberate breakages of the package, one a file: which rule each breaks, and which tests have to notice."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclasses.dataclass(frozen=True)
class Change:
    """Lines to replace inside the definition ``name``, with the indentation that they share taken off."""

    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Two lines, ``Rule:`` and ``Tests:``, and below them the changes.

    A change is ``@@`` and the qualified name of a function, a class or a module's variable, then lines as in a diff:
    ``-`` goes, ``+`` comes, a space stays. Neither the file nor the place in it matters, nor the depth of indentation;
    but the lines that go or stay have to follow each other, once, in the definitions of that name.

    ``tests`` is ``races N`` or ``fuzz N`` (that many seeds, until one fails), or what pytest takes.
    """

    name: str
    path: Path
    rule: str
    tests: str
    changes: tuple[Change, ...]

    @classmethod
    def read(cls, path: Path) -> "Mutation":
        """The mutation in ``path``. Raises ``ValueError`` if it is not of this form."""
        head, *blocks = path.read_text().split("\n@@ ")
        lines = dict(line.split(": ", 1) for line in head.splitlines() if line)
        if lines.keys() != {"Rule", "Tests"} or not blocks:
            raise ValueError(f"{path}: expected 'Rule: ...', 'Tests: ...' and at least one '@@ name', found {lines}.")
        return cls(path.stem, path, lines["Rule"], lines["Tests"], tuple(map(_change, blocks)))

    @property
    def seeds(self) -> tuple[str, int] | None:
        """The module that tries seeds and how many of them, if that is the test."""
        kind, _, count = self.tests.partition(" ")
        return (f"tests.{kind}", int(count)) if kind in ("races", "fuzz") else None

    def changed(self, sources: "Sources") -> dict[Path, str]:
        """What the changed files contain then. Raises ``LookupError`` if lines to change are not found exactly once."""
        edits: dict[Path, list[tuple[int, int, list[str]]]] = {}
        for change in self.changes:
            try:
                path, start, lines = sources.place(change)
            except LookupError as error:
                raise LookupError(f"tests/mutations/{self.path.name} has to be renewed: {error}") from None
            edits.setdefault(path, []).append((start, start + len(change.old), lines))
        texts = {}
        for path, parts in edits.items():
            lines = list(sources.lines[path])
            for start, end, new in sorted(parts, reverse=True):
                lines[start:end] = new
            texts[path] = "\n".join(lines)
        return texts


class Sources:
    """The Python files of ``folder``, read once, and where everything in them is defined."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lines: dict[Path, list[str]] = {}
        self._spans: dict[str, list[tuple[Path, int, int]]] = {}
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text()
            self.lines[path] = text.split("\n")
            for name, start, end in _definitions(ast.parse(text)):
                self._spans.setdefault(name, []).append((path, start, end))

    def place(self, change: Change) -> tuple[Path, int, list[str]]:
        """The file, the index of the first line that goes, and what comes instead."""
        spans = self._spans.get(change.name, [])
        found = []
        for path, start, end in spans:
            lines = self.lines[path][start:end]
            for index in range(len(lines) - len(change.old) + 1):
                indent = lines[index][: len(lines[index]) - len(change.old[0])]
                if not indent.strip() and lines[index : index + len(change.old)] == _indented(change.old, indent):
                    found.append((path, start + index, _indented(change.new, indent)))
        if len(found) == 1:
            return found[0]
        text = "\n".join(change.old)
        where = ", ".join(f"{path.relative_to(self.folder.parent)}:{start + 1}" for path, start, _ in found or spans)
        if not spans:
            raise LookupError(f"nothing in {self.folder.name}/ is called {change.name}.")
        raise LookupError(f"found {len(found)} times in {change.name} ({where}), not once:\n{text}")


def _definitions(tree: ast.AST, prefix: str = "", local: bool = False) -> Iterator[tuple[str, int, int]]:
    """Qualified name, first line from 0 and end of each function and class, and of each variable outside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first - 1, node.end_lineno
            yield from _definitions(node, f"{prefix}{node.name}.", not isinstance(node, ast.ClassDef))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not local:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, node.lineno - 1, node.end_lineno
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _definitions(node, prefix, local)


def _change(block: str) -> Change:
    name, *lines = block.rstrip("\n").split("\n")
    texts = [line[1:] for line in lines]
    margin = min((len(text) - len(text.lstrip()) for text in texts if text.strip()), default=0)
    old = tuple(text[margin:] for line, text in zip(lines, texts, strict=True) if not line.startswith("+"))
    new = tuple(text[margin:] for line, text in zip(lines, texts, strict=True) if not line.startswith("-"))
    if not old or not old[0] or old == new or any(line[:1] not in ("", " ", "+", "-") for line in lines):
        raise ValueError(
            f"@@ {name}: expected lines that begin with '-', '+' or a space, and one that is there already."
        )
    return Change(name.strip(), old, new)


def _indented(lines: tuple[str, ...], indent: str) -> list[str]:
    return [indent + line if line else line for line in lines]


def all_mutations() -> list[Mutation]:
    """Sorted by name."""
    return [Mutation.read(path) for path in sorted(FOLDER.glob("*.patch"))]
