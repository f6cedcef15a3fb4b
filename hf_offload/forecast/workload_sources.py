"""Where a workload comes from: a recipe, a folder with a configuration, or a name of the hub."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from hf_offload.errors import OffloadConfigError
from hf_offload.forecast.options import PLANNED, WorkloadOptions
from hf_offload.forecast.workload import DEFAULT_OPTIMIZER, Workload, class_for, state_elements
from hf_offload.forecast.workload_inputs import default_length
from hf_offload.settings.load import choose, nearest
from hf_offload.settings.memory_modes import read_mode_settings
from hf_offload.settings.models import KnownModel, known_model, model_names
from hf_offload.settings.recipe_files import PRESETS, recipe_names
from hf_offload.settings.recipes import TASKS, load_recipe
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.shown import listed, shown
from hf_offload.settings.text_files import is_folder, reason_of
from hf_offload.settings.values import expand

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HUB_TIMEOUT_S = 3.0
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def find_workload(
    source: str, overrides: Sequence[str] = (), *, settings: Mapping[str, Any] | None = None, **options: Any
) -> Workload:
    """From a recipe, a folder with a ``config.json`` (with or without weights), a short name or a name of the hub.

    ``options`` are fields of :class:`~hf_offload.forecast.options.WorkloadOptions`, ``settings`` those fields of
    :class:`~hf_offload.OffloadConfig` that a plan depends on; both replace what the recipe says. Without a recipe, batch 1
    and 2048 tokens (or as many as the model takes), ten seconds of audio, images of the size that the configuration names.

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    asked = WorkloadOptions(**options)
    task, sequence = asked.task, asked.sequence
    if task is not None and not _is_class(task):
        choose("task", task, TASKS)
    preset = f"{PRESETS}{source}"
    folder = expand("model", source)
    if is_folder(folder):
        found = _from_folder(source, folder)
    elif folder.suffix in (".yaml", ".yml") or source in recipe_names() or preset in recipe_names():
        recipe = preset if preset in recipe_names() else source
        found = _from_recipe(recipe, overrides, settings or {})
        found = found if recipe == source else dataclasses.replace(found, name=source)
        overrides, settings = (), None
    else:
        known = known_model(source)
        found = _from_config(source, _config(source)) if known is None else _from_known(source, known)
    if overrides:
        raise OffloadConfigError(f"{overrides[0]!r} changes a recipe, but {source!r} is not one: drop it.")
    if settings:
        found = dataclasses.replace(found, settings=OffloadConfig(**settings))
    changes = {
        name: getattr(asked, name) for name in ("batch", "sequence", "image_size", "task", "optimizer", "sharding")
    }
    changes |= {"state_place": asked.state, "weights_place": asked.weights}
    changes["dtype"] = None if asked.dtype is None else getattr(torch, asked.dtype)
    found = dataclasses.replace(found, **{name: value for name, value in changes.items() if value is not None})
    if asked.autocast is not None:
        found = dataclasses.replace(found, autocast=None if asked.autocast == "no" else getattr(torch, asked.autocast))
    if task is not None and sequence is None and folder.suffix not in (".yaml", ".yml"):
        found = dataclasses.replace(found, sequence=min(found.sequence, found.longest or found.sequence))
    if asked.memory_mode is not None or asked.memory_mode_kwargs is not None:
        found = found.in_mode(asked.memory_mode or found.memory_mode, asked.memory_mode_kwargs)
    if asked.optimizer is not None and found.mode is not None:
        raise OffloadConfigError(
            f"optimizer={asked.optimizer!r} and memory_mode={found.memory_mode!r} both choose the optimizer: drop one."
        )
    longest = found.longest
    if longest is not None and found.sequence > longest:
        raise OffloadConfigError(f"sequence={found.sequence}, but {found.name} has {longest} positions: give fewer.")
    if sequence is not None and not found.length_unit:
        raise OffloadConfigError(
            f"sequence={sequence}, but rows of {found.model_class.__name__} have no length: leave it out."
        )
    state_elements(found.optimizer)
    return found


def _from_recipe(name: str, overrides: Sequence[str], settings: Mapping[str, Any]) -> Workload:
    recipe = load_recipe(name, overrides)
    offload = recipe.offload
    if settings:  # with tier auto, as a plan is about all tiers
        offload = OffloadConfig(**{field: getattr(offload, field) for field in PLANNED} | dict(settings))
    model = recipe.model
    if model.name is not None and model.published is None:
        config = _config(model.name)
    else:
        architecture, fields = model.architecture, model.config
        if model.published is not None:
            architecture, fields = model.published.architecture, model.published.config
        trained = {} if recipe.data.train_bpe is None else {"vocab_size": recipe.data.train_bpe}
        config = _make_config(str(architecture), trained | dict(fields), model.task)
    training = recipe.training
    autocast = torch.bfloat16 if training.get("bf16") else torch.float16 if training.get("fp16") else None
    return Workload(
        name=recipe.name,
        config=config,
        task=model.task,
        batch=int(training.get("per_device_train_batch_size", 8)),
        sequence=recipe.data.sequence_length,
        target_sequence=recipe.data.target_length,
        dtype=getattr(torch, model.dtype),
        autocast=autocast,
        attention=model.attention,
        optimizer=str(training.get("optim", DEFAULT_OPTIMIZER)),
        memory_mode=recipe.offload.memory_mode,
        # A plan is about tier auto, and so is the default of both, whatever tier the recipe trains with.
        state_place=recipe.offload.optimizer or "auto",
        weights_place=recipe.offload.params or "auto",
        names_drive=bool(recipe.offload.drive_settings) or recipe.offload.ram_budget == 0,
        memory_mode_kwargs=read_mode_settings(recipe.offload.memory_mode_kwargs),
        settings=offload,
    )


def _make_config(architecture: str, fields: Mapping[str, Any], task: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture, **{"bos_token_id": None, "eos_token_id": None, **fields})
    if hasattr(config, "use_cache"):
        config.use_cache = False  # as the Trainer has it
    if task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def _from_folder(name: str, folder: Path) -> Workload:
    if not (folder / "config.json").is_file():
        raise OffloadConfigError(f"{folder} has no config.json: name the folder of a model or of a checkpoint.")
    found = _from_config(name, _config(str(folder)))
    weights: collections.Counter[str] = collections.Counter()
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as stored:  # of which only the header is read
                for one in map(stored.get_slice, stored.keys()):
                    weights[one.get_dtype()] += math.prod(one.get_shape())
        except (OSError, SafetensorError) as error:
            raise OffloadConfigError(f"{file} is not a whole safetensors file: {error}.") from error
    if not weights:
        return found
    ((main, _),) = weights.most_common(1)
    if main not in _SAFETENSORS_DTYPES:
        raise OffloadConfigError(
            f"{folder}: most weights are stored as {main}, which is not a dtype to train in: pass --dtype."
        )
    return dataclasses.replace(found, dtype=getattr(torch, _SAFETENSORS_DTYPES[main]))


def _from_known(name: str, model: KnownModel) -> Workload:
    config = _make_config(model.shape.architecture, model.shape.config, model.task)
    found = _from_config(name, config, model.task)
    return dataclasses.replace(found, dtype=getattr(torch, model.dtype))


def _from_config(name: str, config: "PretrainedConfig", task: str | None = None) -> Workload:
    task = task or _task_of(config)
    dtype = getattr(config, "dtype", None)
    return Workload(
        name=name,
        config=config,
        task=task,
        batch=1,
        sequence=default_length(class_for(task, config), config),
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def _task_of(config: "PretrainedConfig") -> str:
    """The task that a configuration is for: by the class it names, or by what there is for its type."""
    from transformers.models.auto import modeling_auto

    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    mappings = {
        "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    known = [task for task, mapping in mappings.items() if type(config) in mapping]
    if architecture.endswith("ForPreTraining") and "masked-lm" in known:
        return "masked-lm"
    if _is_class(architecture):
        named = [task for task in known if class_for(task, config).__name__ == architecture]
        return named[0] if named else architecture
    if known:
        return "seq2seq-lm" if "seq2seq-lm" in known else "causal-lm" if "causal-lm" in known else known[0]
    for mapping in (
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        modeling_auto.MODEL_FOR_CTC_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING,
        modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
    ):
        if type(config) in mapping:
            found: Any = mapping[type(config)]
            return str((found[0] if isinstance(found, tuple) else found).__name__)
    raise OffloadConfigError(
        f"The configuration of this {config.model_type} names no task: pass --task with the name of a class of "
        "transformers."
    )


def _is_class(name: str) -> bool:
    """Whether ``name`` is a class of transformers that is trained, with a head and a loss."""
    import transformers

    found = getattr(transformers, name, None) if name[:1].isupper() else None
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


def _config(source: str) -> "PretrainedConfig":
    """Of a folder, or of a model of the hub: a name that the hub's cache does not hold is asked for once."""
    from transformers import AutoConfig

    is_local = is_folder(Path(source))
    offline = not is_local and not _answers_hub(source)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, local_files_only=is_local or offline)
    except Exception as error:  # whatever the library raises for such a file
        reason = "the hub cannot be reached, and its cache does not hold it." if offline else reason_of(error)
        known = [*model_names(), *(name.removeprefix(PRESETS) for name in recipe_names())]
        raise OffloadConfigError(
            f"{shown(source)} is not a shipped recipe, a folder with a config.json or a model of the hub: "
            f"{reason}{nearest(source, known)} Nearest: {listed(known, source)}."
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _answers_hub(name: str) -> bool:
    """Whether the hub answers at all, asked once: its own client tries again for half a minute."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return False  # no need to ask
        return (
            get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).status_code < 500
        )  # a proxy's refusal, too
    except HFValidationError:
        return True  # not a name of the hub: its client says why, without asking
    except Exception:  # whatever the transport raises, which differs between versions
        return False
