"""What users read is plain English in the terms of the field: words that were replaced do not come back.

Searched: docstrings, messages and help texts (all string literals of the package), comments, names of definitions, and
documents.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORDS = {
    r"lean_activations|\blean\b|\bLeanConfig\b": "recompute of elementwise operations, recompute_elementwise",
    r"\b([Mm]ade|[Mm]akes?|[Mm]aking|[Cc]omputed?|[Cc]omputes) (\w+ ){0,2}again\b": "recomputed, rebuilt",
    r"\b(of|to|than|vs|below|repeat) keep\b(?! (any|it|the|them|this|what))|\bkeep('s| itself)\b": "no offloading, baseline",
    r"\bgoe?s? before\b": "takes precedence over",
    r"\bbeside\b": "in addition to, next to",
    r"\busual size\b": "average size",
    r"(?<!there )(?<!here )\bis no (?!(longer|more|less|larger|smaller|faster|slower|better|worse|later|different)\b)\w+": (
        "is not a ..."
    ),
    r"\bno English words\b": "say which words are expected",
    r"\bmistakes?\b": "errors",
    r"\b[Ss]ay [`'\"]*\w+=": "Pass ..., set ...",
    r"\btold\b(?! apart)|\bhears?\b|\b[Ww]hoever\b|\b[Nn]obody\b|\b[Ss]omebody\b": "the component that acts",
    r"\bgraveyard\b|\bbur(y|ied)\b|\bbequeath": "finalizer queue, cleanup",
    r"\bpatiently\b": "with a watchdog",
    r"\bmerits?\b": "objective",
    r"\bkicks?\b": "perturbation",
    r"at_disk_write_limit|disk_rated|HF_OFFLOAD_DISK_RATED_BYTES": "on_disk_write_limit, drive_endurance_bytes",
}
"""Pattern of a replaced word -> what to write instead."""

NAMES = {
    r"(?<![cC])lean|Lean": "recompute_elementwise, rematerialization",
    r"^_?(Estate|graveyard|bury|bequeath)": "finalizer queue, cleanup",
    r"gone_backward": "after_backward",
    r"patiently": "call_with_watchdog",
    r"need_less": "on_infeasible",
    r"^_?follow$": "apply_plan",
    r"^_?(Moment|Stretch|Figure|merit|kicks?)(_|$)": "segment, interval, measurement, objective, perturbation",
    r"at_disk_write_limit|disk_rated": "on_disk_write_limit, drive_endurance_bytes",
}
"""Pattern of the name of a class, function, argument or variable -> what to call it."""


def searched() -> list[str]:
    files = [*ROOT.glob("*.md"), ROOT / "model_cards" / "make.sh", *(ROOT / "docs").glob("*.md")]
    for folder, kinds in {
        "hf_offload": ("py",),
        "benchmarks": ("py",),
        "examples": ("py", "yaml", "sh"),
        "recipes": ("yaml",),
    }.items():
        files += [path for kind in kinds for path in (ROOT / folder).rglob(f"*.{kind}")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and what is to be read there."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), start=1)
        return
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and what is defined there."""
    for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def found(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 40]!r}: {better}"
        for words, places in ((WORDS, texts(path)), (NAMES, names(path)))
        for line, text in places
        for pattern, better in words.items()
        for match in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("name", searched())
def test_replaced_words_do_not_come_back(name):
    assert not found(ROOT / name), "\n" + "\n".join(found(ROOT / name))


@pytest.mark.parametrize(
    ("text", "is_replaced"),
    [
        ("what is saved is made again", True),
        ("ratio to keep", True),
        ("room to keep the rest", False),
        ("'x' is no mapping", True),
        ("there is no file", False),
        ("it is no longer used", False),
        ("3 mistakes in a.yaml", True),
        ("Say retain_graph=True", True),
        ("clean up, leaning on it", False),
        ("beside the card", True),
    ],
)
def test_patterns(text, is_replaced):
    assert any(re.search(pattern, text) for pattern in WORDS) == is_replaced
