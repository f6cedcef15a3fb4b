"""``hf-offload train`` from the command line to the files it leaves."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_offload import attach
from hf_offload.allocator import best_allocator, environment_with, find_mimalloc, find_tcmalloc
from hf_offload.bench.strategies import find_strategy
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.recipes import load_recipe
from hf_offload.training.report import TrainingReport
from hf_offload.training.run import run_recipe
from tests.helpers.command_line import command, said
from tests.helpers.loaded_processes import run_python


def trained(recipe, *overrides):
    path = Path("report.json")
    path.unlink(missing_ok=True)
    result = command("train", recipe, *overrides, "--report", path)
    assert result.exit_code == 0, result.output + result.stderr
    return TrainingReport.read(path)


RECOMPUTE = next(change for change in find_strategy("recompute").overrides if change.endswith("=true"))
OFFLOAD = ("offload.tier=ssd", "offload.min_bytes=1KiB", "offload.directory=tier")


def test_a_recipe_trains_from_end_to_end(tiny_recipe):
    result = command("train", tiny_recipe, "--report", "report.json")
    assert result.exit_code == 0, result.output + result.stderr
    assert "tiny: done" in result.output
    assert "loss" in result.output
    report = TrainingReport.read(Path("report.json"))
    assert report.completed
    assert report.steps == len(report.losses) == len(report.step_times_s) == 4
    assert report.losses[-1] < report.losses[0]
    assert [float.fromhex(loss) for loss in report.losses_hex] == report.losses
    assert report.offload is None
    assert report.memory["peak_bytes"] >= report.memory["baseline_bytes"] > 0
    assert len(report.memory["timeline_s"]) == len(report.memory["timeline_bytes"])
    assert report.machine["threads"] >= 1
    assert set(report.versions) >= {"python", "torch", "transformers", "accelerate", "datasets"}


def test_offloading_changes_no_bit_of_losses_and_weights(tiny_recipe):
    overrides = ["data.streaming=true", "training.gradient_accumulation_steps=2", RECOMPUTE]
    keep = trained(tiny_recipe, *overrides)
    offloaded = trained(tiny_recipe, *overrides, *OFFLOAD)
    assert offloaded.losses_hex == keep.losses_hex
    assert offloaded.parameters_sha256 == keep.parameters_sha256
    assert offloaded.offload["written_bytes"] > 0


TINY = "num_layers: 1, num_heads: 2, d_model: 32, d_ff: 64, d_kv: 16, vocab_size: 100"
TASKS = {
    "masked-lm": "architecture: bert, config: {num_hidden_layers: 2, num_attention_heads: 2, hidden_size: 32, "
    "intermediate_size: 64, vocab_size: 100}",
    "seq2seq-lm": f"architecture: t5, config: {{{TINY}}}",
    "causal-lm": "architecture: llama, config: {num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, "
    "hidden_size: 32, intermediate_size: 64, vocab_size: 100}",
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_on_random_tokens_without_datasets(tiny_recipe, monkeypatch, task):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    overrides = (
        f"model={{task: {task}, {TASKS[task]}}}",
        "data={source: random-tokens, sequence_length: 16}",
        "training.gradient_accumulation_steps=2",
    )
    report = trained(tiny_recipe, *overrides, *OFFLOAD, "offload.min_bytes=256")
    assert report.steps == 4
    assert all(0 < loss < 20 for loss in report.losses)
    assert report.offload["written_bytes"] > 0


def test_files_in_another_folder(tiny_recipe, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "text.txt").rename(tmp_path / "elsewhere" / "text.txt")
    assert "(seen from " in command("train", tiny_recipe).stderr
    result = command("train", tiny_recipe, "data.data_dir=elsewhere", "--report", "report.json")
    assert result.exit_code == 0, result.output + result.stderr
    assert TrainingReport.read(Path("report.json")).losses_hex


def test_every_setting_of_a_recipe_reaches_the_session(tiny_recipe, monkeypatch):
    for folder in ("a, b", " c "):
        Path(folder).mkdir()
    recipe = load_recipe(
        tiny_recipe,
        [
            "offload={tier: ssd, directory: ['a, b', ' c '], ram_budget: 1MiB, disk_budget: 1GiB, min_bytes: 3KiB, "
            "keep_last_count: 1, read_ahead_bytes: 5MiB, verify: checksum, max_disk_write_bytes: 7GiB, "
            "on_disk_write_limit: stop, drive_endurance_bytes: 600TB, "
            "tiled_loss: on, tiled_mlp: [mlp], tile_bytes: 16KiB, "
            "recompute_elementwise: [norms, activations]}",
            "training.max_steps=3",
        ],
    )
    used = []
    monkeypatch.setattr(
        "hf_offload.integrations.trainer.attach",
        lambda model, config, **about: used.append(config) or attach(model, config, **about),
    )
    assert run_recipe(recipe).steps == 3
    assert used == [recipe.offload]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nothing/here"], "There is no recipe 'nothing/here'"),
        (["gpt/dmeo"], "Did you mean 'gpt/demo'"),
        (["tiny.yaml", "training.do_train=true", "offload.teir=ssd"], "2 errors"),
        (["tiny.yaml", "nonsense"], "'nonsense' is not an override"),
        (["tiny.yaml", "data.sequence_length=65"], "longer than the 64 positions"),
        (["tiny.yaml", "model.config.vocab_size=100"], "embeddings for 100"),
        (["tiny.yaml", "data.files=none.txt"], "there is no file 'none.txt'"),
        (["tiny.yaml", "model.attention=telepathy"], "telepathy"),
        (["tiny.yaml", "training.optim=adamm"], "adamm"),
        (["tiny.yaml", "training.fp16=true", "training.bf16=true"], "section training"),
    ],
)
def test_bad_input_gives_one_message_and_code_2(tiny_recipe, arguments, part):
    result = command("train", *arguments)
    assert result.exit_code == 2
    assert part in said(result)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("method", "steps"), [("training_step", 2), ("create_optimizer", 0), ("_inner_training_loop", 0)]
)
def test_ctrl_c_gives_a_summary_of_what_was_done(method, steps, tiny_recipe, monkeypatch):
    calls, original = [], getattr(Trainer, method)

    def interrupted(self, *args, **kwargs):
        calls.append(method)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, interrupted)
    result = command("train", tiny_recipe, *OFFLOAD, "--report", "report.json")
    assert result.exit_code == 130
    assert "tiny: stopped" in result.output
    report = TrainingReport.read(Path("report.json"))
    assert not report.completed
    assert report.steps == steps
    if steps:
        assert report.memory["peak_bytes"] > 0
        assert report.offload["written_bytes"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
@pytest.mark.parametrize("name", ["glibc-tuned", "glibc", "tcmalloc", "mimalloc"])
def test_a_child_runs_with_the_allocator_that_was_asked_for(name, monkeypatch):
    if name == "tcmalloc" and find_tcmalloc() is None:
        pytest.skip("tcmalloc is not installed")
    if name == "mimalloc" and find_mimalloc() is None:
        pytest.skip("mimalloc is not installed")
    # What the parent runs with must not leak into the child.
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "7")
    for variable in ("TCMALLOC_RELEASE_RATE", "MIMALLOC_PURGE_DELAY"):
        monkeypatch.setenv(variable, "7")
        assert environment_with(name).get(variable) is None
    assert _allocator_of_a_child(environment_with(name)) == name


@pytest.mark.skipif(sys.platform != "linux" or find_mimalloc() is None, reason="mimalloc is not installed")
def test_auto_is_tcmalloc_then_mimalloc_then_glibc(monkeypatch):
    """A child tells what it really runs with; of tcmalloc, which may not be here, that it is what would be preloaded."""
    monkeypatch.setattr("hf_offload.allocator.find_tcmalloc", lambda: "/lib/libtcmalloc_minimal.so.4")
    assert best_allocator() == "tcmalloc"
    environment = environment_with("auto")
    assert environment["LD_PRELOAD"].split(":")[0] == "/lib/libtcmalloc_minimal.so.4"
    assert environment["TCMALLOC_RELEASE_RATE"] == "0"  # it keeps its pages
    monkeypatch.setattr("hf_offload.allocator.find_tcmalloc", lambda: None)
    assert (best_allocator(), _allocator_of_a_child(environment_with("auto"))) == ("mimalloc", "mimalloc")
    monkeypatch.setattr("hf_offload.allocator.find_mimalloc", lambda: None)
    assert (best_allocator(), _allocator_of_a_child(environment_with("auto"))) == ("glibc-tuned", "glibc-tuned")
    with pytest.raises(OffloadConfigError, match=r"mimalloc.*pip install 'hf-offload\[cpu\]'"):
        environment_with("mimalloc")


def _allocator_of_a_child(environment):
    program = "from hf_offload.allocator import current_allocator; import sys; sys.stdout.write(current_allocator())"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_other_systems_keep_their_allocator(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("LD_PRELOAD", "")
    assert best_allocator() == "system"
    assert "LD_PRELOAD" not in environment_with("auto")
    with pytest.raises(OffloadConfigError, match="Linux only"):
        environment_with("mimalloc")


def test_a_library_that_cannot_be_named_in_the_variable_is_not_used(monkeypatch, tmp_path):
    """LD_PRELOAD is a list separated by blanks and colons."""

    class Package:
        files = (Path("lib/libmimalloc.so"),)
        folder = tmp_path / "plain"

        def locate_file(self, file):
            return self.folder / file

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Package())
    monkeypatch.setattr("hf_offload.allocator._installed_library", lambda *names: None)
    for name, found in (("plain", True), ("with blanks", False), ("a:b", False)):
        Package.folder = tmp_path / name
        (Package.folder / "lib").mkdir(parents=True)
        assert find_mimalloc() is None, "the file is missing"
        (Package.folder / "lib/libmimalloc.so").touch()
        assert (find_mimalloc() is not None) == found


SCRIPT = """
import torch, hf_offload
for _ in range(2):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    hf_offload.attach(model, hf_offload.OffloadConfig(tier="TIER")).detach()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the package moves activations off the accelerator")
@pytest.mark.parametrize(("tier", "allocator", "count"), [("ram", None, 1), ("none", None, 0), ("ram", "glibc", 0)])
def test_a_script_is_told_once_what_another_allocator_would_gain(monkeypatch, tier, allocator, count):
    for variable in ("HF_OFFLOAD_ALLOCATOR", "LD_PRELOAD"):
        monkeypatch.delenv(variable, raising=False)
    environment = dict(os.environ) if allocator is None else environment_with(allocator)
    script = SCRIPT.replace("TIER", tier)
    done = run_python([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "heap fragments" in line]
    assert len(told) == count, done.stderr
    assert all("hf-offload launch" in line for line in told)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux allocators")
@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="a GPU does the work, so the CPU's allocator does not matter"
)
def test_train_starts_itself_again_with_the_best_allocator_once(tiny_recipe):
    """A choice that was made is left alone."""
    command = [sys.executable, "-m", "hf_offload", "train", str(tiny_recipe), "--report", "report.json"]
    plain = {key: value for key, value in os.environ.items() if key not in ("HF_OFFLOAD_ALLOCATOR", "LD_PRELOAD")}
    for by, environment, expected in (
        (subprocess.run, plain, best_allocator()),
        (run_python, environment_with("glibc"), "glibc"),
    ):
        done = by(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "kernels" not in done.stderr, "of 4-bit weights, which nobody asked for"
        assert TrainingReport.read(Path("report.json")).allocator == expected


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (["training.fsdp=full_shard"], "Using fsdp only works in distributed training"),
        (["training.optim_args=foo"], "the training cannot begin with this section training: not enough values"),
        (["model.config.activation_function=foo"], "section model: KeyError: 'foo'"),
    ],
)
def test_settings_that_only_the_trainer_refuses_are_an_error_of_the_recipe(tiny_recipe, changes, part):
    result = command("train", tiny_recipe, *changes)
    assert result.exit_code == 2, result.output
    assert part in said(result)


def test_what_a_step_raises_keeps_its_traceback(tiny_recipe):
    @contextlib.contextmanager
    def around():
        raise ValueError("of the step")
        yield

    with pytest.raises(ValueError, match="of the step") as raised:
        run_recipe(load_recipe(tiny_recipe), around_step=lambda model: around())
    assert not isinstance(raised.value, OffloadConfigError)
