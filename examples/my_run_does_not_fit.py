# %% [markdown]
"""My run does not fit: what now?

Where does memory go, what would each way out cost, and which one is it? Run it cell by cell in an editor that knows `# %%`,
or all at once: `python examples/my_run_does_not_fit.py`. It takes a small LLaMA with random weights and a budget that it does
not fit, on whatever device there is. For a model of your own, change the next cell: `CONFIG` to
`AutoConfig.from_pretrained("...")`, `BATCH` and `SEQUENCE`, and `SHARE` to what your card has.
"""

# %%
import statistics
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_offload import OffloadCallback, OffloadError, OffloadTrainingArguments
from hf_offload.forecast.compare_modes import compare_modes
from hf_offload.forecast.forecast import make_forecast
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.planning.hardware import measure_hardware
from hf_offload.settings.sizes import format_bytes
from hf_offload.training.memory import MemoryMeter

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4, dtype="float32"
)
BATCH, SEQUENCE, STEPS = 4, 256, 4
SHARE = 0.6  # the budget: so much of what the run would need

work = tempfile.TemporaryDirectory()  # yours: a folder on the SSD
CONFIG.save_pretrained(work.name)

# %% [markdown]
# ## 1. Where would memory go?
#
# A step is counted on tensors without data: no weights are loaded, so this works for a model that fits nowhere. In a shell:
# `hf-offload plan FOLDER_OR_NAME --batch 4 --sequence 256`, and with `--gpu rtx4090` for a machine that is not there.

# %%
hardware = measure_hardware([work.name])
workload = find_workload(work.name, [], batch=BATCH, sequence=SEQUENCE, dtype="float32")
forecast = make_forecast(workload, hardware)
footprint = forecast.problem.footprint
baseline = next(row for row in forecast.rows if row.name == "baseline")
whole = baseline.timeline.peak_bytes
state = footprint.base_bytes + footprint.gradient_bytes
budget = int(SHARE * whole)

print(f"weights and optimizer state  {format_bytes(footprint.base_bytes):>12}")
print(f"gradients                    {format_bytes(footprint.gradient_bytes):>12}")
print(f"saved for backward           {format_bytes(sum(footprint.saved_bytes.values())):>12}")
for kind in sorted(set(footprint.classes.values())):
    saved = sum(footprint.saved_bytes[unit] for unit, own in footprint.classes.items() if own == kind)
    print(f"    of it by {kind:20}{format_bytes(saved):>12}")
print(f"peak of a step               {format_bytes(whole):>12}, in {baseline.timeline.peak_unit}")
print(f"budget                       {format_bytes(budget):>12}")

# %% [markdown]
# If weights, gradients and optimizer state alone are above the budget, go to 4: moving activations cannot help. If what is
# saved is most of it, offloading and checkpointing do. If the peak is in the output head, it is the logits: a tiled loss.
#
# ## 2. What would each way do?
#
# *auto* is the plan: what to leave, move or recompute so that the step is the fastest that fits.

# %%
forecast = make_forecast(workload, hardware, budget_bytes=budget)
print(f"{'predicted':16}{'peak':>12}{'fits':>6}{'step':>9}")
for row in forecast.rows:
    if row.timeline is not None:
        peak, step_s = format_bytes(row.timeline.peak_bytes), row.timeline.step_s
        print(f"{row.name:16}{peak:>12}{'yes' if row.fits else 'no':>6}{step_s:>8.2f}s")
print(forecast.refusal or "There is a plan for the budget.")

# %% [markdown]
# ## 3. Is that so?
#
# A few steps of each that changes no result, and of a tiled loss, which changes last bits. `MemoryMeter` measures what the
# allocator has handed out above weights, gradients and optimizer state.


# %%
def train(**flags: str) -> tuple[int, float, float]:
    """Peak in bytes, step in seconds, loss. Raises OffloadError for a budget that is too small."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)  # yours: from_pretrained
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH * STEPS, SEQUENCE))
    arguments = OffloadTrainingArguments(
        output_dir=work.name,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        **flags,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    meter = MemoryMeter()
    meter.install(trainer)
    loss = trainer.train().training_loss
    peak = state + meter.record.peak_bytes - meter.record.baseline_bytes
    if (
        meter.record.baseline_in_use_bytes is not None
    ):  # a CPU: resident memory has what the allocator keeps at hand, too
        peak = state + meter.record.peak_in_use_bytes - meter.record.baseline_in_use_bytes
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, OffloadCallback) and callback.forecast is not None:
            peak = (
                callback.forecast.measured_peak_bytes or peak
            )  # of a step under the plan; the first is there to measure
    return peak, statistics.median(meter.step_times_s[2:]), loss


WAYS = {
    "baseline": {},
    "ssd": {"offload": "ssd", "offload_directory": work.name},
    "ssd, tiled loss": {"offload": "ssd", "offload_directory": work.name, "tiled_loss": "on"},
    "auto": {"offload": "auto", "offload_memory_budget": str(budget), "offload_directory": work.name},
}
measured = {}
print(f"{'measured':18}{'peak':>12}{'fits':>6}{'step':>9}{'loss':>11}")
for way, flags in WAYS.items():
    try:
        peak, step_s, loss = measured[way] = train(**flags)
    except OffloadError as refusal:
        print(f"{way:18}refused. {refusal}")
        continue
    print(f"{way:18}{format_bytes(peak):>12}{'yes' if peak <= budget else 'no':>6}{step_s:>8.2f}s{loss:>11.6f}")
print(f"offloading changed the loss: {measured['ssd'][2] != measured['baseline'][2]}")

# %% [markdown]
# ## 4. If weights and optimizer state are too large
#
# Then train less at a time: adapters, or an optimizer with a small state: `hf-offload plan FOLDER --modes`.

# %%
comparison = compare_modes(workload, hardware, ["none", "lora", "apollo_mini", "lisa"], budget_bytes=budget)
print(f"{'predicted':12}{'weights':>12}{'gradients':>12}{'state':>12}{'peak':>12}{'fits':>6}")
for mode in comparison.rows:
    figures = mode.weights_bytes, mode.gradient_bytes, mode.state_bytes, mode.peak_bytes
    print(
        f"{mode.mode:12}"
        + "".join(f"{format_bytes(one):>12}" for one in figures)
        + f"{'yes' if mode.fits else 'no':>6}"
    )

# %% [markdown]
# ## 5. What it is going to be
#
# The fastest that was measured to fit, exact ways first; else the mode that needs least.

# %%
fits = [way for way in measured if measured[way][0] <= budget]
exact = [way for way in fits if "tiled" not in way]
if fits:
    chosen = min(exact or fits, key=lambda way: measured[way][1])
    slower = measured[chosen][1] / measured["baseline"][1]
    print(
        f"Decision: {chosen}, {format_bytes(measured[chosen][0])} of {format_bytes(whole)}, {slower:.2f} x baseline step:"
    )
    print(", ".join(f"{name}={value!r}" for name, value in WAYS[chosen].items()))
else:
    least = min(comparison.rows, key=lambda mode: mode.peak_bytes)
    print(f"Decision: memory_mode={least.mode!r}, predicted {format_bytes(least.peak_bytes)}; with offload='ssd' less.")
work.cleanup()
