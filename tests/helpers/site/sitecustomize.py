"""Run by every process that a test starts, before anything else: see tests/conftest.py."""

import os
import sys

# Packages that are not there.
sys.modules |= dict.fromkeys(os.environ.get("TESTS_HIDE", "").split())  # type: ignore[arg-type]
