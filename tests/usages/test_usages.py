"""Every usage of the table, with weights, gradients and optimizer state in memory and on each tier: the same bits."""

import pytest
import torch

from tests.helpers.tables import rows
from tests.helpers.train import Run, let_state_come_and_go, same, stream_in_parts
from tests.usages import graphs, models, optimizers, state, steps, weights  # noqa: F401  which fill the table
from tests.usages.table import USAGES

# Gradients go where the state goes.
COLUMNS = {
    "weights-ram": {"params": "ram"},
    "weights-ssd": {"params": "ssd"},
    "state-ram": {"optimizer": "ram"},
    "state-ssd": {"optimizer": "ssd"},
    "all-ram": {"params": "ram", "optimizer": "ram"},
    "all-ssd": {"params": "ssd", "optimizer": "ssd"},
    "state-sometimes": {"optimizer": "ssd"},  # of some weights, drawn after each step
    "state-in_backward": {"optimizer": "ssd"},
}
TABLE = [
    (name, column)
    for name, usage in USAGES.items()
    for column in COLUMNS
    if (usage.in_backward or column != "state-in_backward") and (usage.steps or column.startswith("weights"))
]
# Everything in each kind of column, and what is about state where it comes and goes.
QUICK = [
    (name, column)
    for name, column in TABLE
    if column in ("weights-ssd", "state-ssd", "all-ram", "state-in_backward")
    or (column == "state-sometimes" and USAGES[name].function.__module__ not in (weights.__name__, models.__name__))
]


@pytest.fixture(autouse=True)
def compiled_for_each_test():
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about what is used here
@pytest.mark.parametrize(("name", "column"), rows(TABLE, quick=QUICK))
def test_bits(name, column, tmp_path, monkeypatch):
    usage, settings = USAGES[name], {"optimizer": "none", **COLUMNS[column]}
    stream_in_parts(monkeypatch)
    expected = Run("none", tmp_path)
    torch.manual_seed(5)
    usage.function(expected)
    if column == "state-sometimes":
        let_state_come_and_go(monkeypatch, seed=len(name))
    in_backward = column == "state-in_backward"
    found = Run(settings.pop("optimizer"), tmp_path, defers=usage.defers, in_backward=in_backward, **settings)
    torch.manual_seed(5)
    usage.function(found)
    assert len(expected.logged) == len(found.logged) > 1
    pairs = zip(expected.logged, found.logged, strict=True)
    assert [number for number, pair in enumerate(pairs) if not same(*pair)] == []
    assert found.written_bytes() > 0 or usage.holds
