"""Deliberate breakages of the engine, one a file: which rule each breaks, and which tests have to notice."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A unified diff with two lines above it, ``Rule:`` and ``Tests:``.

    ``tests`` is ``races N`` or ``fuzz N`` (that many seeds, until one fails), or what pytest takes.
    """

    name: str
    path: Path
    rule: str
    tests: str

    @classmethod
    def read(cls, path: Path) -> "Mutation":
        """The mutation in ``path``. Raises ``ValueError`` if a line is missing above the diff."""
        lines = dict(line.split(": ", 1) for line in path.read_text().split("\n\n", 1)[0].splitlines())
        if lines.keys() != {"Rule", "Tests"}:
            raise ValueError(f"{path}: expected the lines 'Rule: ...' and 'Tests: ...' above the diff, found {lines}.")
        return cls(path.stem, path, lines["Rule"], lines["Tests"])

    @property
    def seeds(self) -> tuple[str, int] | None:
        """The module that tries seeds and how many of them, if that is the test."""
        kind, _, count = self.tests.partition(" ")
        return (f"tests.{kind}", int(count)) if kind in ("races", "fuzz") else None

    @property
    def files(self) -> list[str]:
        """What the diff changes, from the root of the tree."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(), re.MULTILINE)

    def apply(self, tree: Path) -> str:
        """Change the files of ``tree``; returns git's complaint, which is empty if there is none."""
        # A repository around the tree would have git look for the files there.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        command = ["git", "apply", str(self.path)]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False).stderr


def all_mutations() -> list[Mutation]:
    """Sorted by name."""
    return [Mutation.read(path) for path in sorted(FOLDER.glob("*.patch"))]
