"""``python -m benchmarks lengths`` and ``orders``: what is predicted, without a run."""

import itertools
import json

from tests.helpers.command_line import benchmark, said

LLAMA = [
    "llama-1b", "model.config.num_hidden_layers=2", "model.config.hidden_size=256", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2", "model.config.intermediate_size=1024", "model.config.head_dim=64",
]  # fmt: skip


def test_every_lever_reaches_at_least_as_far(monkeypatch):
    monkeypatch.setattr("benchmarks.lengths.PIECES", (8, 2))
    result = benchmark("lengths", *LLAMA, "--gpus", "rtx4090,h200", "--ram", "1TB", "--ssd", "5GB/s", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    for card in found["levers"][0]["tokens"]:
        reach = [lever["tokens"][card] for lever in found["levers"]]
        assert reach[0] > 0
        # Offloaded inputs wait in windows of their own, which cost a short row a little.
        assert all(later > 0.95 * earlier for earlier, later in itertools.pairwise(reach))
        assert reach[-1] > 3 * reach[0]
    assert "in addition" in benchmark("lengths", *LLAMA, "--gpus", "l4", "--ssd", "5GB/s").stdout


def test_lengths_are_refused_for_a_model_with_few_positions():
    assert "1024 positions" in said(benchmark("lengths", "gpt2-small"))


def test_orders_and_what_none_can_beat():
    result = benchmark("orders", *LLAMA, "--gpu", "rtx4090", "--sequence", "1024", "--json")
    assert result.exit_code == 0, result.stderr
    orders = {row["order"]: row for row in json.loads(result.stdout)["orders"]}
    assert all(row["bound_bytes"] <= row["peak_bytes"] for row in orders.values())
    default, every = orders["autograd's order"]["peak_bytes"], orders["all of them"]["peak_bytes"]
    for name in ("update in backward", "tiled loss", "tiled loss and MLP"):
        assert every <= orders[name]["peak_bytes"] <= default
    assert orders["tiled loss"]["peak_bytes"] < default
    assert "no order beats" in " ".join(
        benchmark("orders", *LLAMA, "--gpu", "rtx4090", "--sequence", "1024").stdout.split()
    )
