"""A browser without a window, if the machine has one: what it makes of a page, with and without scripts."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def rendered(page: Path, profile: Path, *, scripts: bool) -> tuple[str, list[str]]:
    """The document once ``page`` has been shown, and what was written to the console. Skips the test without a browser."""
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(_NAMES)} is installed")
    (profile / "Default").mkdir(parents=True, exist_ok=True)
    if not scripts:
        blocked = {"profile": {"default_content_setting_values": {"javascript": 2}}}
        (profile / "Default" / "Preferences").write_text(json.dumps(blocked))
    found = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", "--dump-dom", page.resolve().as_uri(),
        ],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    errors = found.stderr.decode(errors="replace").splitlines()
    return found.stdout.decode(), [line for line in errors if ":CONSOLE" in line]
