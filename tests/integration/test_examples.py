"""Every example runs as it is, does what it is there to show, and leaves nothing on the disk."""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from hf_offload.forecast import forecast
from tests.helpers.loaded_processes import run_in_loaded_process

EXAMPLES = Path(__file__).parents[2] / "examples"

# Offloaded, by the Trainer's log or by the counters; and what else an example is about.
LOGGED = r"'offload/drive_written_gib': '?(?!0[,'}])\d"
COUNTED = r"StepStats\(.*written_bytes=[1-9]"
SUMMARY = r"[1-9][\d.]* MiB written and [1-9][\d.]* MiB read in all"
SHOWN = {
    "accelerator_loop": [SUMMARY],
    "galore": [LOGGED, r"optimizer state: 1,\d{3},\d{3} bytes, AdamW's would be 4,\d{3},\d{3}"],
    "larger_than_memory": [
        r"16,\d{3},\d{3} bytes of weights, at most [1-9],\d{3},\d{3} of them", r"largest of the last layer: 0\.\d+",
    ],
    "my_run_does_not_fit": [
        r"peak of a step +1\d\d\.\d+ MiB, in LlamaForCausalLM", "There is a plan for the budget",
        r"auto +\d+\.\d+ MiB", "changed the loss: False", r"Decision: (ssd|auto)",
    ],
    "peft_lora": [LOGGED, r"trainable params: \d,\d{3} "],
    "plain_loop": [COUNTED],
    "sampled_linear": [r"self_attn.q_proj: error .* \d\.\d+ at 0.3", r"12 linear layers estimate"],
    "trainer_callback": [COUNTED],
    "trainer_flag": [LOGGED],
    "trl_sft": [LOGGED],
    "vision": [LOGGED],
}  # fmt: skip


def run(path, folder):
    """What ``python path`` does."""
    torch.set_num_threads(1)  # enough for models as small as these
    forecast._BUDGETS = 2  # as in `few_budgets`
    tempfile.tempdir = None  # read the variable again
    os.chdir(folder / "here")
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("name", SHOWN)
def test_example(name, tmp_path):
    for folder in ("tmp", "here"):
        (tmp_path / folder).mkdir()
    places = {"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    code = run_in_loaded_process(
        run, EXAMPLES / f"{name}.py", tmp_path, output=tmp_path / "output", environment=os.environ | places
    )
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    for shown in SHOWN[name]:
        assert re.search(shown, output), f"{shown!r} is not in\n{output}"
    assert [*(tmp_path / "tmp").iterdir(), *(tmp_path / "here").iterdir()] == []


def test_unmodified_script_is_launched(tmp_path):
    command = ["hf_offload", "launch", "--config_file", str(EXAMPLES / "unmodified_script.yaml")]
    here = tmp_path / "here"
    here.mkdir()
    # accelerate loads torch's compiler, which makes its folder at once.
    places = {"TMPDIR": str(here), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    environment = os.environ | places | {"COLUMNS": "500"}
    script = EXAMPLES / "unmodified_script.py"
    done = subprocess.run(
        [sys.executable, "-m", *command, script, "--steps", "2"],
        env=environment, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(SUMMARY, done.stdout), done.stdout
    assert len(re.findall(r"^loss ", done.stdout, re.MULTILINE)) == 2
    assert list(here.iterdir()) == []


def test_pairs_to_classify(tmp_path):
    """What the recipe for MiniLM trains on."""
    (tmp_path / "papers").mkdir()
    papers = [{"document": f"abstract {number}", "summary": f"summary {number}"} for number in range(5)]
    for name in ("train", "validation"):
        (tmp_path / "papers" / f"{name}.jsonl").write_text("".join(json.dumps(paper) + "\n" for paper in papers))
    script = [sys.executable, EXAMPLES / "abstract_pairs.py"]
    done = subprocess.run([*script, "papers", "pairs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "10 pairs" in done.stdout
    for name in ("train", "validation"):
        rows = [json.loads(line) for line in (tmp_path / "pairs" / f"{name}.jsonl").read_text().splitlines()]
        assert [row["label"] for row in rows] == 5 * ["own", "another"]
        for row in rows:
            own = row["summary"].split()[1] == row["abstract"].split()[1]
            assert own == (row["label"] == "own")
        # Of what is another's, each summary stands there once, so that none is told by how often it does.
        assert len({row["summary"] for row in rows if row["label"] == "another"}) == 5
    asked = subprocess.run(script, capture_output=True, text=True)
    assert asked.returncode == 1
    assert "abstract_pairs.py scitldr pairs" in asked.stderr


def test_no_example_is_left_out():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWN, "unmodified_script", "abstract_pairs"}
    assert "hf_offload" not in (EXAMPLES / "unmodified_script.py").read_text().split('"""')[2]
