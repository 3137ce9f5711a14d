"""Configurations of networks of transformers: listed keys with plain, bounded values, of classes that we choose."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vargen.folders.json_files import BOOL, Allowed, Kind, choice, expect, pick_values, read_config, whole
from vargen.values import NumberRange, one_line
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
_QUANTIZATION: dict[str, Allowed] = {
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "llm_int8_has_fp16_weight"), BOOL),
    **dict.fromkeys(("llm_int8_enable_fp32_cpu_offload", "bnb_4bit_use_double_quant"), BOOL),
    "llm_int8_threshold": NumberRange(-math.inf, math.inf),
    "llm_int8_skip_modules": Kind(lambda value: isinstance(value, list) and all(map(_is_name, value)), "names of modules"),
    "quant_method": choice("bitsandbytes"),
    "bnb_4bit_quant_type": choice("fp4", "nf4"),
    "bnb_4bit_compute_dtype": choice("float32", "float16", "bfloat16"),
    "bnb_4bit_quant_storage": choice("uint8", "float32", "float16", "bfloat16"),
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
        what = given.get("model_type", part_class.model_type) if isinstance(given, dict) else given
        fits = isinstance(given, dict) and what == part_class.model_type
        expect(fits, name, what, file, f"a configuration of {part_class.model_type!r}")
        found[name] = {**pick_config(part_class, given, {}, file, num_tensors), "model_type": part_class.model_type}
    known = _list_arguments(config_class)
    for name in (known.keys() | _COMMON) - parts.keys():
        if name in values:
            value, usual = values[name], type(known.get(name))
            expect(not isinstance(value, bool) or usual not in (int, float), name, value, file, "a number")
            expect(value is None or isinstance(value, bool) or usual is not bool, name, value, file, BOOL.allowed)
            found[name] = _validate_value(name, value, file, num_tensors)
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
    others = "that of 'bitsandbytes', or weights that are not quantized: pass quantization_config when opening those"
    expect(method == "bitsandbytes", "quantization_config", method, file, others)
    return pick_values(values, _QUANTIZATION, file)


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


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _TEXT.fullmatch(value) is not None


def _validate_value(name: str, value: Any, file: Path, num_tensors: int, depth: int = 0) -> Any:
    if name == "vocabulary_map":
        fits = isinstance(value, dict) and len(value) <= _MAX_ENTRIES and all(map(whole(0, _MAX_SIZE).fits, value.values()))
        expect(fits, name, value, file, "token ids by name")
        return value
    if name in _COUNTS and value is not None:
        allowed = whole(0, min(MAX_LAYERS, num_tensors))
        expect(allowed.fits(value), name, value, file, f"{allowed.allowed}, as its weights hold {num_tensors} tensors")
        return value
    if value is None or isinstance(value, bool) or _is_name(value):
        return value
    if name.endswith("_eps"):
        expect(NumberRange(0, 1).fits(value), name, value, file, "a number from 0 to 1")
    if isinstance(value, int) and (1 if name in _LIMITS else -1) <= value <= _LIMITS.get(name, _MAX_SIZE):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if name == "mrope_section":
        expect(isinstance(value, list) and all(map(whole(1, _MAX_SIZE).fits, value)), name, value, file, "whole numbers")
    longest = MAX_LAYERS if name == "layer_types" else _MAX_LENGTH
    if isinstance(value, list) and len(value) <= longest and depth < 3:
        return [_validate_value(name, each, file, num_tensors, depth + 1) for each in value]
    fits = isinstance(value, dict) and len(value) <= _MAX_ENTRIES and depth < 2 and all(len(key) <= 100 for key in value)
    expect(fits, name, value, file, "a plain value of usual size")
    return {key: _validate_value(key, each, file, num_tensors, depth + 1) for key, each in value.items()}
