"""``hf-offload plan`` for models of images, speech and experts: what is counted, against real steps."""

import json

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor

from hf_offload import OffloadConfig, offload_activations
from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.methods.protocol import OptimizerBytes
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem
from hf_offload.plan.search import uniform
from tests.helpers.command_line import command, said
from tests.helpers.live_bytes import peak_live_bytes

pytestmark = pytest.mark.usefixtures("few_budgets")
CARD = ["--gpu", "24GB", "--tflops", "80", "--pcie", "25GB/s", "--ssd", "5GB/s"]
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"image_size": 64, "patch_size": 8}
SPEECH = {
    "vocab_size": 32, "conv_dim": (32, 32), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2,
    "layerdrop": 0.0, "mask_time_prob": 0.0, "pad_token_id": 0, **SIZE,
}  # fmt: skip
EXPERTS = {"vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 128, **SIZE}


def _whisper():
    return transformers.WhisperConfig(
        vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=8, max_source_positions=100,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def _segformer():
    return transformers.SegformerConfig(
        depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32], sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, image_size=64,
    )  # fmt: skip


def _clip():
    text = {"vocab_size": 64, "max_position_embeddings": 16, **SIZE}
    return transformers.CLIPConfig(text_config=text, vision_config={**IMAGE, **SIZE})


VIT = "ViTForImageClassification"
MODELS = {
    VIT: lambda: transformers.ViTConfig(**IMAGE, **SIZE),
    "SegformerForSemanticSegmentation": _segformer,
    "CLIPModel": _clip,
    "ViTMAEForPreTraining": lambda: transformers.ViTMAEConfig(
        decoder_hidden_size=64, decoder_intermediate_size=64, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        **IMAGE, **SIZE,
    ),
    "Wav2Vec2ForCTC": lambda: transformers.Wav2Vec2Config(**SPEECH),
    "Wav2Vec2ConformerForCTC": lambda: transformers.Wav2Vec2ConformerConfig(**SPEECH),
    "WhisperForConditionalGeneration": _whisper,
    "BertForQuestionAnswering": lambda: transformers.BertConfig(vocab_size=64, max_position_embeddings=64, **SIZE),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(num_local_experts=4, **EXPERTS),
}  # fmt: skip
QUICK = (VIT, "WhisperForConditionalGeneration", "MixtralForCausalLM")
# Where the CPU's library of convolutions makes copies that are counted, or the other way round, and the model is small.
COPIES = ("ViTMAEForPreTraining",)
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODELS]
)


@pytest.fixture
def folder(tmp_path):
    def save(name):
        config = MODELS[name]()
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def length(name):
    return 4000 if name.startswith("Wav2Vec2") else None


def counted(workload, min_bytes=1024):
    with fake_mode():
        model = workload.build()
        batch = workload.inputs(model)
    footprint = count_footprint(
        model, batch, cost=lambda *_: 0.0, optimizer=OptimizerBytes(0, 0, 0), min_bytes=min_bytes,
        as_on_cuda=False, autocast=workload.autocast,
    )  # fmt: skip
    return footprint, batch


def real(value):
    if not isinstance(value, FakeTensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype) if value.constant is None else value.constant.clone()


def real_step(workload, batch):
    torch.manual_seed(0)
    model = workload.model_class._from_config(workload.config, dtype=workload.dtype).train()
    inputs = {name: real(value) for name, value in batch.items()}

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", workload.autocast or torch.bfloat16, enabled=workload.autocast is not None):
            loss = model(**inputs).loss
        loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    return model, step


def assert_saved(footprint, model, step, directory, tolerance):
    """What is counted as saved is what a real step moves."""
    with offload_activations(model, OffloadConfig(tier="ssd", directory=directory, min_bytes=1024)) as session:
        step()
        moved = session.stats.total.offloaded_bytes
    assert sum(one.nbytes for one in footprint.saved) == pytest.approx(moved, rel=tolerance)


@names
def test_what_is_counted_is_what_a_real_step_saves_and_needs(name, folder, tmp_path):
    workload = find_workload(folder(name), batch=8, sequence=length(name), dtype="float32")
    footprint, batch = counted(workload)
    model, step = real_step(workload, batch)
    hardware = describe_hardware("24GB", tflops=80, pcie="25GB/s", ssd="5GB/s")
    kept = uniform(make_problem(footprint, hardware, 1 << 40), Placement.KEEP)
    weights = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    tolerance = 0.1 if name in COPIES else 0.05
    assert kept.timeline.peak_bytes - weights == pytest.approx(peak_live_bytes(step), rel=tolerance)
    assert_saved(footprint, model, step, tmp_path, 0.03)


@names
def test_any_model_is_planned_from_its_configuration(name, folder):
    found, result = plan(folder(name))
    assert result.exit_code == 0, result.stderr
    assert found["predicted"][0]["peak_bytes"] > found["weights_and_optimizer_bytes"]
    images = {VIT: "1 image of 64 x 64", "CLIPModel": "1 image of 64 x 64, 1 x 16 tokens"}
    assert found["shape"] == images.get(name, found["shape"])


def plan(*arguments):
    result = command("plan", *arguments, *CARD, "--dtype", "float32", "--json")
    return json.loads(result.stdout) if result.exit_code == 0 else None, result


def test_routing_does_not_change_what_experts_need(folder):
    """All tokens to the same experts, or spread over all of them."""
    workload = find_workload(folder("MixtralForCausalLM"), batch=2, sequence=128, dtype="float32")
    batch = counted(workload)[1]
    batch["input_ids"] = torch.randint(0, 128, batch["input_ids"].shape)
    model, step = real_step(workload, batch)
    loads = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: loads.append(args[1].unique().numel()))
    peaks = [peak_live_bytes(step)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    model.zero_grad(set_to_none=True)
    peaks.append(peak_live_bytes(step))
    assert loads == [4, 4, 2, 2]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_mixed_precision_is_counted_as_it_runs(folder, tmp_path):
    workload = find_workload(folder(VIT), batch=4, dtype="float32", autocast="bf16")
    footprint, batch = counted(workload)
    model, step = real_step(workload, batch)
    assert_saved(footprint, model, step, tmp_path, 0.01)


def test_mixed_precision_changes_the_plan_of_a_folder_and_of_a_recipe(folder):
    source = folder("MixtralForCausalLM")
    peaks = [
        plan(source, "--batch", "4", *options)[0]["predicted"][0]["peak_bytes"]
        for options in ((), ("--autocast", "no"), ("--autocast", "bf16"))
    ]
    assert peaks[0] == peaks[1] > peaks[2]
    sizes = [f"model.config.{name}" for name in ("n_layer=2", "n_embd=64", "n_head=2")]
    recipe = ["gpt2-small", *sizes, "--sequence", "128"]
    found = [
        plan(*recipe, *options)[0]["autocast"] for options in (("training.bf16=true",), ("--autocast", "bf16"), ())
    ]
    assert found == ["bfloat16", "bfloat16", None]


def test_statistics_of_a_norm_keep_a_counted_block_from_being_recomputed(folder):
    workload = find_workload(folder("Wav2Vec2ConformerForCTC"), batch=1, sequence=4000, dtype="float32")
    footprint, _ = counted(workload)
    names = {span.name for span in footprint.blocks if "num_batches_tracked" in span.not_twice}
    assert {name.partition("layers.")[2] for name in names} == {"0", "1"}


@pytest.mark.parametrize(
    ("name", "config", "options", "message"),
    [
        ("LlavaForConditionalGeneration", transformers.LlavaConfig, (), "mixes images and tokens"),
        (VIT, MODELS[VIT], ("--sequence", "8"), "have no length"),
        (VIT, MODELS[VIT], ("--autocast", "int8"), "autocast="),
        (VIT, MODELS[VIT], ("--task", "ViTFor"), "task="),
        ("ViTModel", MODELS[VIT], (), "The kind of labels of ViTModel is not known"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(name, config, options, message, tmp_path):
    made = config()
    made.architectures = [name]
    made.save_pretrained(tmp_path)
    _, result = plan(str(tmp_path), *options)
    assert result.exit_code == 2
    assert message in said(result)
