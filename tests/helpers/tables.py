"""Tables of one rule over many models, modes and tiers: ``make test`` runs a few rows of each, ``make test-full`` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(all_of_them: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """For ``pytest.mark.parametrize``: the rows that are not among ``quick`` are marked ``full``."""
    table = list(all_of_them)
    missing = [row for row in quick if row not in table]
    if missing:
        raise LookupError(f"{missing} are not among {table}.")
    return [
        row if row in quick else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.full)
        for row in table
    ]
