"""The tree shows the architecture: which folder may import which, and what each says of itself."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_offload"
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-logo",
            "--no-cache",
        ],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_arrows_point_one_way():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def test_an_arrow_back_is_noticed(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "hf_offload", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "hf_offload" / "storage" / "tier.py").open("a") as file:
        file.write("\nfrom hf_offload.engine import stats\nfrom hf_offload.storage import spill\n")
    found = lint(tmp_path)
    assert found.returncode == 1
    for broken in ("Arrows point one way", "import each other in a circle"):
        assert any(broken in row and row.endswith("BROKEN") for row in found.stdout.splitlines())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_says_what_lives_in_it_and_what_may_not(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert len(re.findall(r"\.(?=\s|$)", text)) >= 2, f"{folder.name}: {text}"
