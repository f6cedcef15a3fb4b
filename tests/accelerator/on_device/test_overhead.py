"""``hf-offload bench overhead`` where there is an accelerator."""

import json

import torch
from typer.testing import CliRunner

from hf_offload.cli.main import app


def test_what_a_tensor_costs_the_host_of_a_device_has_a_row(late):
    before = torch.accelerator.memory_allocated()
    result = CliRunner().invoke(app, ["bench", "overhead", "--tensors", "8", "--repetitions", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["costs"]}
    assert rows["from the device"]["pack"]["median_us"] > 0
    assert rows["from the device"]["unpack_and_free"]["median_us"] > 0
    assert torch.accelerator.memory_allocated() == before
