"""What programs do to models: wrap, replace, resize and tie modules, average them, and put adapters around them."""

import itertools

import bitsandbytes
import peft
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from tests.helpers.architectures import make_batch, make_model
from tests.helpers.train import adamw, batch, mlp, train
from tests.usages.table import usage

# -- modules that change -------------------------------------------------------------------------------------------------

WRAPPERS = [
    (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    (parametrizations.spectral_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
    (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
]


@usage("wav2vec2 and HiFi-GAN, whose weights are normalised, and torch's pruning tutorial")
def weights_are_wrapped_and_unwrapped(run):
    for (wrap, unwrap), before in itertools.product(WRAPPERS, (False, True)):
        model = mlp()
        if not before:
            run.attach(model)
        torch.manual_seed(1)
        wrap(model[2])
        train(run, model, adamw(run, model), steps=2)
        unwrap(model[2])
        optimizer = adamw(run, model)
        train(run, model, optimizer, steps=2)
        run.log_all(model, optimizer)


@usage("PyTorch's docs, torch.optim.swa_utils; diffusers' EMA")
def averages(run):
    model = mlp()
    optimizer = adamw(run, model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    swa = run.attach(torch.optim.swa_utils.AveragedModel(model, use_buffers=True))
    train(run, model, optimizer, after=lambda _: (average.update_parameters(model), swa.update_parameters(model)))
    torch.optim.swa_utils.update_bn([batch(5)], swa)
    run.log(average.state_dict(), swa.state_dict(), swa(batch(0)))
    run.log_all(model, optimizer)


@usage("transfer learning of torchvision and timm: layers are replaced and added")
def layers_come_and_go(run):
    model = run.attach(mlp())
    layer = model[2]
    torch.manual_seed(1)
    model[2] = nn.Linear(128, 160)
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    model.insert(0, nn.LayerNorm(96))
    model[1].weight = nn.Parameter(model[1].weight.detach() * 0.9)
    optimizer = adamw(run, model)
    train(run, model, optimizer)
    run.log_all(model, optimizer)
    run.log(layer.weight)


def _gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config)


def _loss_of_words(model, inputs):
    words = (inputs[:2, :8].abs() * 20).long() % 64
    return model(input_ids=words, labels=words).loss


def _train_gpt2(run, model, attached=None):
    """Trains ``model``, which is or has the one that is ``attached``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = run.prepare(model if attached is None else attached, torch.optim.AdamW(trained, lr=1e-2))
    train(run, model, optimizer, steps=2, loss=_loss_of_words)
    run.log_all(model, optimizer)


@usage("transformers: resize_token_embeddings and tie_weights")
def embeddings_are_resized_and_tied(run):
    model = run.attach(_gpt2())
    _train_gpt2(run, model)
    torch.manual_seed(2)
    model.resize_token_embeddings(70)
    run.log(model.lm_head.weight is model.transformer.wte.weight)
    _train_gpt2(run, model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() * 2)
    _train_gpt2(run, model)
    model.tie_weights()
    run.log(model.lm_head.weight is model.transformer.wte.weight)
    _train_gpt2(run, model)


# -- adapters and quantisation -------------------------------------------------------------------------------------------


@usage("PEFT's docs: adapters are added, switched, disabled, merged, unmerged and deleted")
def adapters_come_and_go(run):
    base = run.attach(_gpt2())
    _train_gpt2(run, base)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(2)
    model = peft.get_peft_model(base, config)
    _train_gpt2(run, model, base)
    model.add_adapter("second", config)
    model.set_adapter("second")
    _train_gpt2(run, model, base)
    with model.disable_adapter():
        run.log(model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits)
    model.merge_adapter()
    run.let_weights_leave()
    run.log(model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits)
    model.unmerge_adapter()
    model.delete_adapter("default")
    _train_gpt2(run, model, base)
    _train_gpt2(run, model.merge_and_unload().requires_grad_(True), base)


def _train_llama(run, model):
    optimizer = adamw(run, model)

    def loss(model, inputs):
        return model(**make_batch("llama", int(inputs[0, 0] * 100) % 50)).loss

    train(run, model, optimizer, loss=loss)
    run.log_all(model, optimizer)
    model.eval()
    with torch.no_grad():
        run.log(model(**make_batch("llama", 100)).logits)


def _adapted(model, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).train()


def quantised(kind):
    """A llama whose layers are quantised in place, with adapters."""
    model = make_model("llama")
    if kind != "int8":  # some processors have kernels for 4 bits, which take no narrower layers
        model.config.hidden_size, model.config.intermediate_size, model.config.head_dim = 64, 128, 16
        torch.manual_seed(0)
        model = LlamaForCausalLM(model.config)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            sizes, weight = (module.in_features, module.out_features, False), module.weight.detach()
            if kind == "int8":
                layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            else:
                options = {"quant_type": kind, "compress_statistics": kind == "nf4"}
                layer = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, **options)
                layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **options)
            model.model.set_submodule(name, layer.to("cpu"))
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"
    return _adapted(model)


@usage("PEFT's docs: LoRA of all linear layers, and DoRA")
def lora_and_dora(run):
    for use_dora in (False, True):
        _train_llama(run, _adapted(make_model("llama"), use_dora=use_dora))


@usage("PEFT's docs, Quantization: QLoRA with 4 bits of both types")
def lora_of_4_bits(run):
    for kind in ("nf4", "fp4"):
        _train_llama(run, quantised(kind))


@usage("PEFT's docs, Quantization: LLM.int8()")
def lora_of_8_bits(run):
    _train_llama(run, quantised("int8"))
