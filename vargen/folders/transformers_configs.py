"""Configurations of networks of transformers: listed keys with plain, bounded values, of classes that we choose."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vargen.folders.json_files import one_line, pick_values, read_config
from vargen.values import parse_float, parse_int, short_repr
from vargen.weight_files import MAX_LAYERS

# Keys that every configuration may have, beside the arguments of its own class.
_COMMON = frozenset(
    "tie_word_embeddings bos_token_id eos_token_id pad_token_id rope_theta rope_scaling rope_parameters "
    "partial_rotary_factor".split()
)
# Numbers of modules: at most as many as there are stored tensors, because even a network without memory takes time to build.
_COUNTS = frozenset("num_hidden_layers num_layers num_decoder_layers depth num_res_blocks".split())
_LIMITS = {
    "image_size": 8192,
    "resolution": 8192,
    "num_image_tokens": 2**16,
    "num_patches": 2**16,
    "temporal_downsample_factor": 64,
    "rope_theta": 2**40,
}
_MAX_SIZE = 2**24  # of other whole numbers
_MAX_LENGTH = 64  # of lists of sizes
_MAX_ENTRIES = 2**18  # of mappings, such as that of image tokens
_TEXT = re.compile(r"[\w.+-]{0,100}")  # a name: no path, no id of the hub

_GENERATION = (
    "bos_token_id eos_token_id pad_token_id do_sample temperature top_k top_p max_length max_new_tokens guidance_scale "
    "generation_kwargs"
).split()
_QUANTIZATION = {
    "load_in_8bit": bool, "load_in_4bit": bool, "llm_int8_threshold": float, "llm_int8_has_fp16_weight": bool,
    "llm_int8_enable_fp32_cpu_offload": bool, "bnb_4bit_use_double_quant": bool, "llm_int8_skip_modules": list,
}  # fmt: skip
_QUANTIZATION_CHOICES = {
    "quant_method": ("bitsandbytes",),
    "bnb_4bit_quant_type": ("fp4", "nf4"),
    "bnb_4bit_compute_dtype": ("float32", "float16", "bfloat16"),
    "bnb_4bit_quant_storage": ("uint8", "float32", "float16", "bfloat16"),
}


def pick_config(
    config_class: Any, values: Mapping[str, Any], parts: Mapping[str, str], file: Path, num_tensors: int
) -> dict[str, Any]:
    """Return the arguments of a configuration class of transformers that a JSON file gives; other keys are left out.

    Args:
        parts: names of the classes of nested configurations, by key.
        num_tensors: number of stored tensors, the most layers that a network may have.
    """
    import transformers

    found: dict[str, Any] = {}
    for name, part in parts.items():
        given = values.get(name)
        if given is None:
            continue
        part_class = getattr(transformers, part)
        if not isinstance(given, dict) or given.get("model_type", part_class.model_type) != part_class.model_type:
            what = given.get("model_type") if isinstance(given, dict) else given
            raise ValueError(f"{file} has {name}: {short_repr(what)}, expected a configuration of {part_class.model_type!r}")
        found[name] = {**pick_config(part_class, given, {}, file, num_tensors), "model_type": part_class.model_type}
    known = _list_arguments(config_class)
    for name in (known.keys() | _COMMON) - parts.keys():
        if name in values:
            value, usual = values[name], type(known.get(name))
            if isinstance(value, bool) and usual in (int, float):
                raise ValueError(f"{file} has {name}: {short_repr(value)}, expected a number")
            if value is not None and not isinstance(value, bool) and usual is bool:
                raise ValueError(f"{file} has {name}: {short_repr(value)}, expected true or false")
            found[name] = _validate_value(name, values[name], file, num_tensors)
    levels, blocks = found.get("channel_multiplier"), found.get("num_res_blocks")
    if isinstance(levels, list) and isinstance(blocks, int) and len(levels) * blocks > num_tensors:
        raise ValueError(
            f"{file} has {len(levels)} numbers in channel_multiplier and num_res_blocks: {blocks}, and its weights hold only "
            f"{num_tensors} tensors"
        )
    return found


def pick_quantization(values: Any, file: Path) -> dict[str, Any]:
    """Return the listed settings of a stored quantization, which must be that of bitsandbytes."""
    method = values.get("quant_method") if isinstance(values, dict) else values
    if method != "bitsandbytes":
        raise ValueError(
            f"{file} has a quantization_config of {short_repr(method)}; vargen loads that of 'bitsandbytes', or quantizes "
            "weights that are not: pass quantization_config when opening them"
        )
    found = pick_values(values, _QUANTIZATION, file)
    for name, allowed in _QUANTIZATION_CHOICES.items():
        if values.get(name) is not None:
            if values[name] not in allowed:
                raise ValueError(f"{file} has {name}: {short_repr(values[name])}, expected one of {', '.join(allowed)}")
            found[name] = values[name]
    skipped = found.get("llm_int8_skip_modules", [])
    if not all(isinstance(each, str) and _TEXT.fullmatch(each) for each in skipped):
        raise ValueError(f"{file} has llm_int8_skip_modules: {short_repr(skipped)}, expected names of modules")
    return found


def pick_generation(folder: Path) -> dict[str, Any]:
    """Return the listed settings of a folder's `generation_config.json`, for loops of transformers; empty if it has none."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    values = read_config(file) if file.is_file() else {}
    found = {name: values[name] for name in _GENERATION if values.get(name) is not None}
    try:
        found = {name: _validate_value(name, value, file, MAX_LAYERS) for name, value in found.items()}
        GenerationConfig(**found)
    except Exception as error:  # transformers raises many types
        raise ValueError(f"{file} holds no generation settings: {one_line(error)}") from error
    return found


@cache
def _list_arguments(config_class: Any) -> dict[str, Any]:
    """The arguments of a configuration class and their defaults, without those of its base class, which concern training,
    export and code."""
    from transformers import PretrainedConfig

    own, base = (inspect.signature(each).parameters for each in (config_class, PretrainedConfig))
    return {name: each.default for name, each in own.items() if name not in base and name != "kwargs"}


def _validate_value(name: str, value: Any, file: Path, num_tensors: int, depth: int = 0) -> Any:
    if name in _COUNTS:
        most = min(MAX_LAYERS, num_tensors)
        if value is not None and parse_int(value, 0, most) is None:
            raise ValueError(
                f"{file} has {name}: {short_repr(value)}, expected a whole number from 0 to {most}, as its weights hold "
                f"{num_tensors} tensors"
            )
        return value
    if name == "vocabulary_map":
        numbers = value.values() if isinstance(value, dict) else [None]
        if len(numbers) > _MAX_ENTRIES or any(parse_int(each, 0, _MAX_SIZE) is None for each in numbers):
            raise ValueError(f"{file} has {name}: {short_repr(value)}, expected token ids by name")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and _TEXT.fullmatch(value):
        return value
    if name.endswith("_eps") and not 0 <= (-1.0 if (number := parse_float(value)) is None else number) <= 1:
        raise ValueError(f"{file} has {name}: {short_repr(value)}, expected a number from 0 to 1")
    if isinstance(value, int) and (1 if name in _LIMITS else -1) <= value <= _LIMITS.get(name, _MAX_SIZE):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if name == "mrope_section" and not (isinstance(value, list) and all(parse_int(each, 1, _MAX_SIZE) for each in value)):
        raise ValueError(f"{file} has {name}: {short_repr(value)}, expected whole numbers")
    longest = MAX_LAYERS if name == "layer_types" else _MAX_LENGTH
    if isinstance(value, list) and len(value) <= longest and depth < 3:
        return [_validate_value(name, each, file, num_tensors, depth + 1) for each in value]
    if isinstance(value, dict) and len(value) <= _MAX_ENTRIES and depth < 2 and all(len(key) <= 100 for key in value):
        return {key: _validate_value(key, each, file, num_tensors, depth + 1) for key, each in value.items()}
    raise ValueError(f"{file} has {name}: {short_repr(value)}, expected a plain value of usual size")
