"""A few rows of torch's own tables; ``make acceptance`` runs all of them."""

import pytest
import torch

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
    assert compare(rows(table, *starts), arms) == {arm: {"same bits": 4} for arm in arms}


def test_a_weight_that_offloading_changes_is_noticed():
    def spoil(model, folder):
        with torch.no_grad():
            model[0].weight.view(-1)[0].add_(1e-3)
        return OPTIMIZER_ARMS["state"](model, folder)

    found = compare(rows(optimizers, "AdamW foreach torch.float32"), {"spoiled": spoil})
    assert [text.partition(" (")[0] for text in found["spoiled"]] == ["differs: AdamW foreach torch.float32"] * 2
