"""``python -m tests.fuzz.architectures``: every architecture of transformers that tiny sizes suit, with weights and optimizer
state on a tier and activations too, against the same training in memory.

Sizes are guessed from the names of a configuration's fields. What does not train in memory with them is left out, with its
reason; what does has to give the same losses, gradients, weights, evaluation and generated tokens.
"""

import contextlib
import copy
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
import typer
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.train import copied, same

_VOCABULARY, _LENGTH, _IMAGE = 96, 16, 16
_MOST_WEIGHTS = 20_000_000
_MOST_S = 90
_STEPS = 2

_SIZES: dict[int, tuple[str, ...]] = {
    _VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    64: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "lru_width",
         "attention_hidden_size"),
    16: ("image_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    8: ("head_dim", "global_head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "hidden_size_per_layer_input", "linear_key_head_dim", "linear_value_head_dim", "mamba_n_heads", "mamba_d_head",
        "sliding_window"),
    4: ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "patch_size", "block_size", "rotary_dim", "laurel_rank",
        "linear_num_value_heads", "state_size", "ssm_state_size", "time_step_rank", "mamba_d_state"),
    3: ("num_channels",),
    2: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
        "num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "mamba_expand", "eos_token_id",
        "attn_layer_period", "expert_layer_period"),
    1: ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id", "attn_layer_offset",
        "decoder_start_token_id"),
    0: ("pad_token_id", "num_kv_shared_layers"),
}  # fmt: skip
_TINY: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names}
_TINY |= {"depths": [1, 1], "hidden_sizes": [16, 32], "attn_layer_indices": [1]}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")

_KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


class UnsuitedError(Exception):
    """No tiny model of an architecture trains in memory."""


def architectures() -> Iterator[tuple[str, str, str]]:
    """Kind, type of the configuration and class of the model; each class once."""
    seen = set()
    for kind, classes in _KINDS.items():
        for model_type, names in classes.items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield kind, model_type, name


def _set(config: Any, depth: int = 0) -> Any:
    """Tiny sizes in a configuration that exists: what it has computed from others stays."""
    for name, size in _TINY.items():
        present = getattr(config, name, None)
        if isinstance(present, (int, list)) and not isinstance(present, bool):
            with contextlib.suppress(Exception):
                setattr(config, name, copy.copy(size))
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        with contextlib.suppress(Exception):
            config.layer_types = (kinds * 2)[: max(2, len(kinds))]
            for name in _LAYERS:
                if hasattr(config, name):
                    setattr(config, name, len(config.layer_types))
    for part in _PARTS:
        if depth < 2 and hasattr(getattr(config, part, None), "to_dict"):
            _set(getattr(config, part), depth + 1)
    return config


def _made(model_type: str, layers: int, *without: str) -> Any:
    """A configuration that computes the others from tiny sizes."""
    default = CONFIG_MAPPING[model_type]()
    sizes = {name: size for name, size in _TINY.items() if isinstance(getattr(default, name, None), (int, list))}
    sizes = {name: size for name, size in sizes.items() if name not in without}
    return type(default)(**sizes | {name: layers for name in _LAYERS if hasattr(default, name)})


def tiny_configs(model_type: str) -> Iterator[Any]:
    """Attempts, one after another. Whether a model can be made of them shows when it is made."""
    for attempt in (
        lambda: _set(CONFIG_MAPPING[model_type]()),
        lambda: _made(model_type, 2),
        lambda: _made(model_type, 4),
        lambda: _made(model_type, 4, "head_dim"),
        lambda: _made(model_type, 6, "qk_rope_head_dim"),
    ):
        try:
            config = attempt()
        except Exception:  # sizes that do not go together
            continue
        config.use_cache = False
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 1
        yield config


def _batch(kind: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "image":
        pixels = torch.randn(2, 3, _IMAGE, _IMAGE, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator)}
    tokens = torch.randint(3, _VOCABULARY - 6, (2, _LENGTH), generator=generator)
    labels = tokens if kind != "sequence" else torch.randint(3, _VOCABULARY - 6, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": labels}


def run(config: Any, name: str, kind: str, checkpointed: bool, place: str | None, tier: str = "none") -> dict[str, Any]:
    """All that a training computes, by name; with ``place``, weights and optimizer state are there, and one weight at a time
    in memory.
    """
    make = getattr(transformers, name)
    with torch.device("meta"):
        if sum(p.numel() for p in make(copy.deepcopy(config)).parameters()) > _MOST_WEIGHTS:
            raise UnsuitedError("too large")
    torch.manual_seed(0)
    model = make(copy.deepcopy(config)).train().float()
    if checkpointed and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = None
    if place is not None:
        session = attach(model, OffloadConfig(tier=tier, params=place, optimizer=place, min_bytes=64))
        session.prepare_optimizer(optimizer)
        session.defer_updates()
        session.residency.limit_bytes = 1
    results: dict[str, Any] = {}
    torch.manual_seed(5)
    for step in range(_STEPS):
        loss = model(**_batch(kind, step)).loss
        loss.backward()
        results[f"loss {step}"] = copied(loss.detach())
        results[f"gradients {step}"] = {n: copied(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        results["evaluation"] = copied(model(**_batch(kind, 100)).loss)
        if kind in ("causal", "sequence"):
            try:
                tokens = _batch(kind, 101)["input_ids"][:, :6]
                results["generated"] = model.generate(tokens, max_new_tokens=4, do_sample=False)
            except Exception as error:  # as in memory
                results["generated"] = type(error).__name__
    results["weights"] = copied(model.state_dict())
    if session is not None:
        used = sum(p.nbytes for p in model.parameters() if p in optimizer.state)  # not an encoder of images without any
        assert session.residency.store.tier.stats.read_bytes > used / 2
        session.detach()
    return results


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise UnsuitedError(f"takes more than {_MOST_S} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(_MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def in_memory(kind: str, model_type: str, name: str, checkpointed: bool) -> tuple[Any, dict[str, Any]]:
    """The first tiny configuration that trains in memory, twice to the same bits, and what it computes."""
    reason = "no configuration"
    for config in tiny_configs(model_type):
        try:
            with _limited():
                expected = run(config, name, kind, checkpointed, None)
                if same(expected, run(config, name, kind, checkpointed, None)):
                    return config, expected
                reason = "not the same twice in memory"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
    raise UnsuitedError(reason)


def differences(architecture: tuple[str, str, str], checkpointed: bool, place: str, tier: str) -> list[str]:
    """Names of what differs from the training in memory. Raises :class:`UnsuitedError` if there is none."""
    kind, model_type, name = architecture
    config, expected = in_memory(kind, model_type, name, checkpointed)
    found = run(config, name, kind, checkpointed, place, tier)
    return [key for key in expected if not same(expected[key], found[key])]


def main(
    only: Annotated[str, typer.Option(help="Types of configurations, separated by commas. Default: all.")] = "",
    after: Annotated[str, typer.Option(help="Begin behind this type.")] = "",
    place: Annotated[str, typer.Option(help="Of weights and state.")] = "ram",
    tier: Annotated[str, typer.Option(help="Of activations.")] = "ram",
) -> None:
    """Look for architectures that compute other bits with offloading."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = [one for one in architectures() if not only or one[1] in only.split(",")]
    if after:
        chosen = chosen[1 + [one[1] for one in chosen].index(after) :]
    same_bits, failed, left_out = 0, 0, 0
    for architecture in chosen:
        label = " ".join(architecture[:2])
        try:
            for checkpointed in (False, True):
                found = differences(architecture, checkpointed, place, tier)
                same_bits += not found
                failed += bool(found)
                if found:
                    print(f"DIFFERENT {label}, checkpointed {checkpointed}: {', '.join(found)}", flush=True)  # noqa: T201
        except UnsuitedError as error:
            left_out += 1
            print(f"left out {label}: {error}", flush=True)  # noqa: T201
        except Exception as error:
            failed += 1
            print(f"FAILED {label}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
    print(f"{len(chosen)} architectures, {left_out} left out; {same_bits} trainings the same, {failed} not")  # noqa: T201
    raise typer.Exit(int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
