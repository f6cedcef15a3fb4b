"""A plan tiles what a run with the same settings tiles."""

import pytest

from hf_offload.forecast.forecast import make_forecast
from hf_offload.forecast.workload import count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.hardware import describe_hardware
from hf_offload.settings.recipes import load_recipe

pytestmark = pytest.mark.usefixtures("few_budgets")
SMALL = [
    "model.config.num_hidden_layers=2", "model.config.hidden_size=64", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2", "model.config.intermediate_size=2048", "model.config.head_dim=16",
    "model.config.vocab_size=512", "offload.tier=auto",
]  # fmt: skip
MLPS = ("model.layers.0.mlp", "model.layers.1.mlp")
CARD = describe_hardware("24GB", tflops=80, pcie="25GB/s", ssd="5GB/s", ram="64GB")


def recipe_of(name):
    return load_recipe(name).offload


def workload(*overrides, **options):
    return find_workload("llama-1b", [*SMALL, *overrides], sequence=1024, **options)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["offload.tiled_mlp=[layers.1.mlp]"], MLPS[1:]),
        (["offload.tiled_mlp=on"], MLPS),
        (["offload.tiled_mlp=auto"], ()),
        (["offload.tiled_loss=auto"], ("lm_head",)),
        (["offload.tiled_loss=on", "offload.tiled_mlp=[model.layers.0.mlp]"], ("lm_head", MLPS[0])),
    ],
)
def test_what_the_settings_name_is_tiled(overrides, expected):
    assert count_workload(workload(*overrides), CARD).tiled == expected


def test_auto_leaves_a_loss_alone_that_cannot_be_tiled():
    found = workload("offload.tiled_loss=auto", task="sequence-classification")
    assert count_workload(found, CARD).tiled == ()


def test_modules_are_tiled_on_auto_only_where_nothing_else_fits():
    in_memory = ("offload.optimizer=none", "offload.params=none")  # else these leave, and nothing has to be tiled
    automatic, off = (
        workload("offload.tiled_mlp=auto", "offload.tile_bytes=1MiB", *in_memory),
        workload(*in_memory),
    )
    roomy = make_forecast(automatic, CARD)
    assert roomy.refusal is None
    assert roomy.problem.footprint.tiled == ()
    least = min(row.timeline.peak_bytes for row in roomy.rows if row.timeline is not None)
    tight = make_forecast(automatic, CARD, budget_bytes=int(0.9 * least))
    assert make_forecast(off, CARD, budget_bytes=int(0.9 * least)).refusal is not None
    assert tight.refusal is None
    assert tight.problem.footprint.tiled == MLPS


def test_the_memory_of_snapshots_is_part_of_the_plan():
    def forecast(ram, *overrides, **options):
        card = describe_hardware("24GB", tflops=80, pcie="25GB/s", ssd="5GB/s", ram=ram)
        return make_forecast(workload(*overrides, **options), card)

    taken, steps, folder = "1GB", "offload.snapshot_steps=10", "offload.snapshot_dir=/nvme/run"
    plain, two, three = forecast(taken), forecast(taken, steps), forecast(taken, steps, folder)
    assert plain.snapshots_bytes == 0
    assert two.snapshots_bytes == 2 * two.counted.base_bytes
    assert three.snapshots_bytes == 3 * three.counted.base_bytes
    assert plain.hardware.room["ram"] - two.hardware.room["ram"] == two.snapshots_bytes
    assert any("Snapshots take" in line for line in two.remarks)
    assert not any("Snapshots take" in line for line in plain.remarks)
    tight = forecast(f"{int(2.5 * two.counted.base_bytes) // 1024}KiB", steps, folder)
    assert tight.solution is None
    assert "Drop snapshot_steps, or snapshot_dir: then two are held" in tight.refusal
    on_drive = forecast(taken, steps, state="ssd", weights="ssd")
    assert on_drive.snapshots_bytes == two.snapshots_bytes  # they are in memory, wherever weights and state are
    assert on_drive.hardware.room["ssd"] == plain.hardware.room["ssd"]
    adapter = make_forecast(workload(steps, memory_mode="lora"), CARD)
    assert 0 < adapter.snapshots_bytes < 2 * adapter.counted.base_bytes


def places(found):
    return found.state_place, found.weights_place


def test_weights_and_state_are_planned_wherever_they_may_be_unless_a_recipe_says_where():
    plain = find_workload("bench/gpt2-small")
    assert recipe_of("bench/gpt2-small").tier == "ssd"
    assert places(plain) == ("auto", "auto")
    assert places(find_workload("bench/gpt2-small", ["offload.optimizer=ssd"])) == ("ssd", "auto")
    assert places(find_workload("bench/gpt2-small", ["offload.optimizer=none", "offload.params=none"])) == ("none",) * 2
    assert places(find_workload("bench/gpt2-small", state="ram")) == ("ram", "auto")


def test_a_plan_for_an_accelerator_uses_a_drive_only_if_one_is_named():
    """So does a run. Ways that were asked for by name, such as tier="ssd", are compared all the same."""
    of_weights = [*SMALL, "model.config.vocab_size=8192"]

    def forecast(*overrides, budget=None, **machine):
        card = describe_hardware("24GB", tflops=80, pcie="25GB/s", ram="1MiB", **machine)
        return make_forecast(
            find_workload("llama-1b", [*of_weights, *overrides], sequence=32), card, budget_bytes=budget
        )

    least, _ = forecast(ssd="5GB/s").frontier[0]
    unnamed = forecast(budget=least)
    assert unnamed.refusal is not None
    placements = [choice.state_placement for _, choice in unnamed.frontier]
    assert all("ssd" not in (one.state, one.weights) for one in placements)
    assert "ssd" in {row.name for row in unnamed.rows}
    for named in (
        forecast(budget=least, ssd="5GB/s"),
        forecast(budget=least, disk="1TB"),
        forecast("offload.directory=/nvme", budget=least),
    ):
        assert named.refusal is None
        assert "ssd" in (named.state_placement.state, named.state_placement.weights)
