"""Builds the documentation as a site: `make docs`. The pages are those of the repository, and so are the links between them.

Pages and the files they link to are copied to a folder that mirrors the repository, so that a link is right on the site
as it is in a checkout; Zensical makes HTML of that, and every warning is an error.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "mkdocs.yml"
SOURCE = ROOT / "runs" / "site_source"
SITE = ROOT / "runs" / "site"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def files() -> set[Path]:
    """The pages, and every file of the repository that a page links to, relative to :data:`ROOT`."""
    found: set[Path] = set()
    queue = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "site.css"]
    while queue:
        path = queue.pop()
        relative = path.relative_to(ROOT)
        if relative in found or not path.exists():
            continue  # a link to nothing is reported by the build
        if path.is_dir():
            queue += sorted(one for one in path.iterdir() if one.is_file())
            continue
        found.add(relative)
        if path.suffix == ".md":
            targets = [link for link in LINK.findall(path.read_text()) if "://" not in link]
            linked = [(path.parent / target).resolve() for target in targets]
            queue += [one for one in linked if one.is_relative_to(ROOT)]
    return found


def stage() -> None:
    """Make :data:`SOURCE` anew. Folders that have no page of their own get one that lists their files."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in sorted(files()):
        target = SOURCE / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
    listed = [one for one in SOURCE.rglob("*") if one.is_dir() and one.name != "docs"]
    for folder in listed:
        names = sorted(one.name for one in folder.iterdir())
        if not any(name.endswith(".md") for name in names) and all((folder / name).is_file() for name in names):
            lines = [f"- [{name}]({name})" for name in names]
            (folder / "index.md").write_text("\n".join([f"# {folder.relative_to(SOURCE)}/\n", *lines]) + "\n")


def build() -> int:
    """Make :data:`SITE`. Returns the exit status of the build, which is not 0 if there was a warning."""
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(CONFIG)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(build())
