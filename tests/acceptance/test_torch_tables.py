"""A few rows of torch's own tables; ``make acceptance`` runs all of them."""

import pytest
import torch
from torch import nn

from tests.acceptance.torch_tables import MODULE_ARMS, OPTIMIZER_ARMS, compare, modules, optimizers


def rows(table, *starts):
    """The first two whose names start so."""
    every = list(table())
    for start in starts:
        yield from [row for row in every if row[0].startswith(start)][:2]


@pytest.mark.parametrize(
    ("table", "arms", "starts"),
    [(optimizers, OPTIMIZER_ARMS, ("Adam fused", "Muon")), (modules, MODULE_ARMS, ("nn.GRU", "nn.Mish"))],
)
def test_a_few_rows_have_the_same_bits(table, arms, starts):
    for tally in compare("few", rows(table, *starts), arms):
        assert tally.same == 4, tally


def test_a_weight_that_offloading_changes_is_noticed():
    def spoil(model, folder):
        with torch.no_grad():
            model[0].weight.view(-1)[0].add_(1e-3)
        return next(iter(OPTIMIZER_ARMS.values()))(model, folder)

    (tally,) = compare("spoiled", rows(optimizers, "AdamW foreach torch.float32"), {"spoiled": spoil})
    assert (tally.same, len(tally.differences)) == (0, 2)


def test_an_error_that_only_offloading_raises_is_noticed():
    def fail(model: nn.Module, folder):
        raise RuntimeError("no tier")

    (tally,) = compare("failing", rows(modules, "nn.Tanh "), {"failing": fail})
    assert len(tally.differences) == 2
    assert "no tier" in tally.differences[0]
