"""Locating and validating model folders, their dtypes, trained drafters and shared components.

A packaged model can share the text encoder of another packaged model instead of storing a copy. Its `borrowed.json` names the
model that has each shared component: `{"text_encoder": "emoji", "tokenizer": "emoji", "prompt_names": "emoji"}`.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import is_accelerate_available, logging
from huggingface_hub import snapshot_download

import vargen.assets
from vargen.assets import packaged_model_path, packaged_models
from vargen.device import preferred_dtype
from vargen.files import expand_user
from vargen.models.described import read_object
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.pipelines.component_files import check_component, check_t5, check_tokenizer
from vargen.pipelines.components import (
    FAMILIES,
    Family,
    check_classes,
    check_no_code,
    check_no_code_keys,
    check_options,
    current_modules,
)
from vargen.pipelines.parts import check_parts
from vargen.values import short_repr
from vargen.weight_files import read_header

FILE = "borrowed.json"
PARTS = ("text_encoder", "tokenizer", "prompt_names")


def shared_component_folders(folder: Path) -> dict[str, Path]:
    """Return, by name of a shared component, the folder of the packaged model that has it.

    Raises:
        ValueError: if `borrowed.json` is damaged, or names an unknown component or model.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        said = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds {short_repr(said)}")
    for part, name in said.items():
        if part not in PARTS or not isinstance(name, str) or name not in packaged_models():
            known = ", ".join(packaged_models()) or "none"
            raise ValueError(
                f"{file} must name packaged models ({known}) for {', '.join(PARTS)}, and has {short_repr({part: name})}"
            )
        if (packaged_model_path(name) / FILE).exists():
            raise ValueError(f"{file} borrows {part} from {name}, which borrows itself")
    return {part: packaged_model_path(name) for part, name in said.items()}


def load_shared_components(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Load the shared components of a model folder, except those that the caller passes in `given`."""
    found: dict[str, Any] = {}
    for part, lender in shared_component_folders(folder).items():
        if part in given:
            continue
        if part == "text_encoder":
            found[part] = MiniLMTextEncoder.from_pretrained(lender / part)
        elif part == "tokenizer":
            from transformers import AutoTokenizer

            found[part] = AutoTokenizer.from_pretrained(lender / part)
    return found


def list_packaged_drafters(family: Family) -> dict[str, Path]:
    """Return the folders of the packaged drafters by name, such as `"emoji/eagle"`."""
    root = Path(vargen.assets.__file__).parent
    found = [config.parent for name in family.drafters for config in sorted(root.rglob(f"{name}/config.json"))]
    return {folder.relative_to(root).as_posix(): folder for folder in found}


def resolve_drafter(name: Any, family: Family, transformer: Mapping[str, Any]) -> tuple[str, Path]:
    """Return the component name of a trained drafter, such as `"eagle"`, and its folder.

    Args:
        name: name of a packaged drafter, or a folder.
        transformer: configuration of the target transformer.

    Raises:
        ValueError: before any weight is read, for an unknown name or folder, or a folder that contains code, no trained
            drafter, or one whose width, vocabulary or grid differs from the transformer's.
    """
    packaged = list_packaged_drafters(family)
    folder = packaged.get(str(name)) or expand_user(name, "drafter")
    if not os.path.isdir(folder):
        known, given = ", ".join(packaged) or "none is packaged", short_repr(str(name))
        raise ValueError(f"drafter must be a folder with a trained drafter, or a packaged one ({known}), got {given}")
    kind = read_object(folder / "config.json").get("_class_name")
    component = next((each for each in family.drafters if family.networks[each].__name__ == kind), None)
    if component is None:
        classes = ", ".join(family.networks[each].__name__ for each in family.drafters) or "none"
        raise ValueError(f"{folder / 'config.json'} describes a {kind!r}; drafters of a {family.pipeline} are {classes}")
    check_no_code(folder)
    config = check_component(folder, family.networks[component])
    try:
        check_parts(family, {"transformer": transformer, component: config})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return component, folder


_SMALL = 50_000_000  # parameters
_LONGEST_ID = 96  # characters of a model id on the Hub
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]  # files fetched from the Hub: none that could be executed


def default_dtype(folder: Path, device: str | torch.device = "cpu") -> torch.dtype:
    """Return the fastest dtype of a device for the transformer of a pipeline folder; float32 for a small one on a CPU.

    Passes of a small network are bound by the number of operations, so bfloat16 gains little. It also makes images depend on
    the method: a pass over more tokens rounds differently, so `auto` and `ar` no longer generate the same image for a seed.
    """
    if torch.device(device).type == "cpu":
        files = (folder / "transformer").glob("*.safetensors")
        if sum(math.prod(stored.shape) for file in files for stored in read_header(file).values()) < _SMALL:
            return torch.float32
    return preferred_dtype(device)


def resolve_dtypes(folder: Path, given: torch.dtype | dict[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """Return the dtype of each component.

    Transformers, trained drafters and a T5 text encoder have the given dtype or, by default, the fastest one. All other
    components are in float32.

    Args:
        given: a dtype, or a dict of dtypes by component (`"default"` for those not named), as in diffusers.

    Raises:
        ValueError: for anything else.
    """
    own: dict[str, torch.dtype] = given if isinstance(given, dict) else {}
    for dtype in own.values() if own else () if given is None else (given,):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype, or a dict of them by component, got {given!r}")
    fast = default_dtype(folder, "cuda" if torch.cuda.is_available() else "cpu")
    dtype = given if isinstance(given, torch.dtype) else own.get("default", fast)
    index = json.loads((folder / "model_index.json").read_text())
    large = (index.get("text_encoder") or [None])[0] == "transformers"
    fast_ones = ("transformer", "draft_transformer", "eagle", "medusa", "low_res")
    dtypes = {"default": torch.float32, **dict.fromkeys(fast_ones, dtype)}
    return {**dtypes, **({"text_encoder": dtype} if large else {}), **own}


def check_model_folder(name: Any, pipeline: str | None, hub_options: dict[str, Any]) -> Path:
    """Locate the folder of a packaged, local or Hub model, and validate it without loading weights.

    Args:
        pipeline: name of the class that loads the model; None allows any of `FAMILIES`.

    Raises:
        ValueError: for an unknown name, a missing `model_index.json` or one of another library, code in the folder or requested
            from elsewhere, or a component that is missing, damaged, does not match its configuration in shape or type, or does
            not match the other components.
    """
    folder, index = read_model_index(name, pipeline, hub_options)
    check_no_code(folder)
    with report_memory(folder):  # reading a header maps the whole file
        _check_components(folder, index, FAMILIES[index["_class_name"]], hub_options)
    return folder


def read_model_index(name: Any, pipeline: str | None, hub_options: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model and its `model_index.json`. Only the index is validated, not the components.

    Raises:
        ValueError: as `check_model_folder`, for the name and the index.
    """
    check_options(hub_options)
    folder = _locate(name, hub_options)
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        commands = " or ".join(f"`{each.convert}`" for each in FAMILIES.values() if pipeline in (None, each.pipeline))
        raise ValueError(
            f"{folder} holds no model_index.json, so it is not a pipeline folder. For official files run {commands} first"
        )
    index = current_modules(read_object(index_file))
    kind = index.get("_class_name")
    if pipeline not in (None, kind):
        raise ValueError(f"{index_file} describes a {kind!r}, this class opens {pipeline!r}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{index_file} describes a {kind!r}; vargen opens {', '.join(FAMILIES)}")
    check_options(hub_options, FAMILIES[kind].classes())
    check_no_code_keys(index, index_file)
    check_classes(index, index_file, hub_options)
    return folder, index


def _check_components(folder: Path, index: dict[str, Any], family: Family, given: dict[str, Any]) -> None:
    """Validate each component in the index that the caller does not pass, then whether all components match each other."""
    variant = given.get("variant")
    named = {part: index[part][1] for part in family.classes() if part not in given and (index.get(part) or [None, None])[1]}
    configs: dict[str, Any] = {part: getattr(given.get(part), "config", None) for part in family.classes()}
    places = {part: lender / part for part, lender in shared_component_folders(folder).items()}
    encoder, words = (places.get(part, folder / part) for part in ("text_encoder", "tokenizer"))
    for part, kind in family.networks.items():
        if part in named:
            configs[part] = check_component(folder / part, kind, variant)
    if named.get("text_encoder") == MiniLMTextEncoder.__name__:
        configs["text_encoder"] = check_component(encoder, MiniLMTextEncoder, variant)
    elif "text_encoder" in named:
        configs["text_encoder"] = check_t5(encoder)
    if "tokenizer" in named:
        check_tokenizer(words, named["tokenizer"])
    try:
        kept = (given.get(name, index.get(name)) for name in ("id2label", "defaults", "prompt_styles"))
        check_parts(family, configs, *kept)
    except ValueError as error:
        raise ValueError(f"{folder / 'model_index.json'}: {error}") from error


def _locate(name: Any, hub_options: dict[str, Any]) -> Path:
    text = str(name)
    if text in packaged_models():
        return packaged_model_path(text)
    path = expand_user(name, "model")
    if os.path.isdir(path):  # Path.is_dir would raise if the name is too long for a file name
        return path
    hub_like = text.count("/") == 1 and not text.startswith((".", "/", "~")) and len(text) <= _LONGEST_ID
    if not hub_like:
        near = difflib.get_close_matches(text, packaged_models(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown model {short_repr(text)}: {hint}give a packaged model ({', '.join(packaged_models()) or 'none'}), "
            "a folder with a model_index.json, or a hub id 'owner/name'"
        )
    known = ("cache_dir", "force_download", "local_files_only", "token", "revision")
    options = {key: hub_options[key] for key in known if key in hub_options}
    try:  # not DiffusionPipeline.download, which accepts only components of diffusers and transformers
        return Path(snapshot_download(text, allow_patterns=_WANTED, **options))
    except Exception as error:
        raise ValueError(f"no local folder {text!r} exists, and fetching the hub model of that name failed: {error}") from error


_LONG_LOADING = 1e9  # bytes of weights from which on a progress bar is shown
_ALLOCATORS = ("can't allocate memory", "not enough memory", "os error 12", "Cannot allocate memory")  # torch, safetensors


def load_options() -> dict[str, Any]:
    """Return options that suppress diffusers' recommendation, once per network, to install accelerate."""
    return {} if is_accelerate_available() else {"low_cpu_mem_usage": False}


@contextmanager
def hide_progress_bars(folder: Path) -> Iterator[None]:
    """Hide the loading bars of diffusers while the block runs, unless the folder has a gigabyte of weights or more."""
    shown = logging.is_progress_bar_enabled() and _weight_bytes(folder) < _LONG_LOADING
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def report_memory(folder: Path) -> Iterator[None]:
    """Report an out-of-memory error while the block loads a folder's weights, with the size of the weights.

    Raises:
        MemoryError: with the folder and the size of its weight files in bytes.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # diffusers reports every error as an unreadable file
            known = any(text in str(cause) for text in _ALLOCATORS)
            if known or isinstance(cause, MemoryError | torch.OutOfMemoryError):
                raise MemoryError(
                    f"out of memory while loading {folder}, whose weight files are {_weight_bytes(folder):,} bytes; "
                    "close other programs, or use a smaller model or dtype"
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
