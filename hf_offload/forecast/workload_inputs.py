"""A batch for any model that a Trainer takes, from its configuration and the signature of its forward.

Batches hold tokens, images, videos, raw audio or its features, with labels as the class's head wants them. What the
configuration does not say is left at what is usual, and is part of what :func:`describe_batch` says.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_offload.errors import OffloadConfigError
from hf_offload.forecast.fake import with_values

DEFAULT_TOKENS = 2048
DEFAULT_SAMPLES = 160_000
"""Ten seconds of audio at 16 kHz."""

_IMAGE_SIZE, _SEGMENTED_IMAGE_SIZE, _CHANNELS, _CHOICES = 224, 512, 3, 4
_ONE_LABEL = ("Classification", "MultipleChoice", "ForXVector")
_TOKEN_LABELS = ("LM", "LMHeadModel", "ForConditionalGeneration", "ForTokenClassification", "EncoderDecoderModel")
_CAUSAL_LABELS = ("Speech2Text",)


def length_unit(model_class: Any, config: Any) -> str:
    """What rows are long in: ``tokens``, ``samples`` of audio, ``frames`` of its features; empty for images."""
    main = model_class.main_input_name
    if main == "input_values":
        return "" if _mel_shape(config) else "samples"
    if main == "input_features" and not _mel_shape(config):
        return "frames"
    return "" if main in ("pixel_values", "pixel_values_videos") and not _writes_text(model_class) else "tokens"


def longest_row(model_class: Any, config: Any) -> int | None:
    """As many tokens as the model has positions for, where it says so."""
    if length_unit(model_class, config) != "tokens":
        return None
    if model_class.main_input_name == "input_features":
        limit = getattr(config, "max_target_positions", None)
    else:
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def default_length(model_class: Any, config: Any) -> int:
    """Of a row, if the user names none; 1 for images, which have none."""
    unit = length_unit(model_class, config)
    usual = {"tokens": DEFAULT_TOKENS, "samples": DEFAULT_SAMPLES, "frames": 1000, "": 1}[unit]
    return min(usual, longest_row(model_class, config) or usual)


def describe_batch(model_class: Any, config: Any, batch: int, sequence: int, image_size: int | None = None) -> str:
    """``"4 x 2048 tokens"``, ``"8 images of 224 x 224"``."""
    unit = length_unit(model_class, config)
    if "pixel_values" in inspect.signature(model_class.forward).parameters:
        height, width = _image_size(model_class, config, image_size)
        images = f"{batch} {'image' if batch == 1 else 'images'} of {height} x {width}"
        return f"{images}, {batch} x {sequence} {unit}" if unit else images
    return f"{batch} x {sequence} {unit}" if unit else f"{batch} rows"


def make_batch(
    model: Any, batch: int, sequence: int, target_sequence: int | None = None, image_size: int | None = None
) -> dict[str, Any]:
    """A batch of zeros for ``model``. Called inside :func:`~hf_offload.forecast.fake.fake_mode`.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a class whose inputs or labels are not known.
    """
    config, cls = model.config, type(model)
    takes = inspect.signature(cls.forward).parameters
    text = getattr(config, "text_config", None)
    if text is not None and any(hasattr(config, name) for name in ("image_token_id", "image_token_index")):
        raise OffloadConfigError(
            f"{cls.__name__} mixes images and tokens in one row in a way that its configuration does not describe, so its "
            "step cannot be counted. Train with offload='auto', which measures it."
        )
    inputs: dict[str, Any] = {}
    size = _image_size(cls, config, image_size)
    if "pixel_values" in takes:
        inputs["pixel_values"] = _pixels(config, batch, size)
    elif "input_values" in takes:
        inputs["input_values"] = torch.zeros(batch, *(_mel_shape(config) or (sequence,)))
    elif "input_features" in takes:
        inputs["input_features"] = torch.zeros(batch, *(_mel_shape(config) or (sequence, _feature_size(cls, config))))
    if "input_ids" in takes and (not inputs or not _writes_text(cls)):
        rows = (batch, _CHOICES) if cls.__name__.endswith("MultipleChoice") else (batch,)
        inputs["input_ids"] = torch.zeros(*rows, sequence, dtype=torch.int64)
    if not inputs:
        raise OffloadConfigError(
            f"The inputs of {cls.__name__} are of unknown kinds ({', '.join(takes)}): its step cannot be counted. Train with "
            "offload='auto', which measures it."
        )
    return inputs | _labels(model, takes, batch, sequence, target_sequence, size)


def _labels(
    model: Any, takes: Any, batch: int, sequence: int, target_sequence: int | None, size: tuple[int, int]
) -> dict[str, Any]:
    name = type(model).__name__
    if "start_positions" in takes and "end_positions" in takes:
        return {one: _known(model, (batch,)) for one in ("start_positions", "end_positions")}
    if "return_loss" in takes:
        return {"return_loss": True}
    if "bool_masked_pos" in takes and name.endswith(("ForMaskedImageModeling", "ForPreTraining")):
        return {"bool_masked_pos": _half_of_the_patches(model, batch, size)}
    if name.endswith("ForCTC"):
        frames = int(model._get_feat_extract_output_lengths(sequence))
        return {"labels": _known(model, (batch, target_sequence or max(1, frames // 4)), 1)}
    if name.endswith("ForSemanticSegmentation"):
        return {"labels": _known(model, (batch, *size))}
    if "labels" in takes and name.endswith((*_TOKEN_LABELS, *_CAUSAL_LABELS)):
        return {"labels": torch.zeros(batch, target_sequence or sequence, dtype=torch.int64)}
    if "labels" in takes and name.endswith(_ONE_LABEL):
        return {"labels": _known(model, (batch,))}
    if "labels" not in takes and name.endswith("ForPreTraining"):
        return {}  # it makes its own target of what it takes
    raise OffloadConfigError(
        f"The kind of labels of {name} is not known, so its step cannot be counted. Train with "
        "offload='auto', which measures it."
    )


def _known(model: Any, shape: Sequence[int], value: int = 0) -> torch.Tensor:
    """Integers whose values may be asked for, although the tensor has no data."""
    with unset_fake_temporarily():
        return with_values(model, torch.full(tuple(shape), value, dtype=torch.int64))


def _half_of_the_patches(model: Any, batch: int, size: tuple[int, int]) -> torch.Tensor:
    config = model.config
    height, width = _pair(config.patch_size)
    patches = (size[0] // height) * (size[1] // width)
    if hasattr(config, "tubelet_size"):
        patches *= config.num_frames // config.tubelet_size
    with unset_fake_temporarily():
        return with_values(model, (torch.arange(patches) % 2 == 0).repeat(batch, 1))


def _pixels(config: Any, batch: int, size: tuple[int, int]) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or _CHANNELS
    frames = (vision.num_frames,) if isinstance(getattr(vision, "num_frames", None), int) else ()
    return torch.zeros(batch, *frames, channels, *size)


def _image_size(model_class: Any, config: Any, given: int | None) -> tuple[int, int]:
    if given is not None:
        return given, given
    for one in (getattr(config, "vision_config", None), getattr(config, "encoder", None), config):
        found = getattr(one, "image_size", None)
        if found:
            return _pair(found)
    side = _SEGMENTED_IMAGE_SIZE if model_class.__name__.endswith("Segmentation") else _IMAGE_SIZE
    return side, side


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict):
        size = list(size.values())
    return int(size[-2]), int(size[-1])


def _mel_shape(config: Any) -> tuple[int, int] | None:
    """Of features that are always as long: a spectrogram, as Whisper or AST take it."""
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        return None
    if hasattr(config, "max_source_positions"):
        return bins, 2 * config.max_source_positions
    return (config.max_length, bins) if isinstance(getattr(config, "max_length", None), int) else None


def _feature_size(model_class: Any, config: Any) -> int:
    for name in ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins"):
        size = getattr(config, name, None)
        if isinstance(size, int):
            return size
    raise OffloadConfigError(
        f"The number of features of {model_class.__name__} is not known: its step cannot be counted. Train with "
        "offload='auto', which measures it."
    )


def _writes_text(model_class: Any) -> bool:
    return model_class.__name__.endswith((*_TOKEN_LABELS, *_CAUSAL_LABELS))
