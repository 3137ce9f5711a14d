"""Opening models of any family: found, checked by configurations and headers, then loaded.

A packaged model can take text encoder, tokenizer and names from another packaged model: `borrowed.json` names it for each.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import vargen.assets
from vargen.assets import packaged_model_path, packaged_models
from vargen.compat import without_autocast
from vargen.device import preferred_dtype, select_device
from vargen.files import expand_user
from vargen.folders.json_files import read_config, read_object
from vargen.folders.networks import WEIGHTS_STEM, NetworkFolder
from vargen.folders.tokenizers import TokenizerFolder
from vargen.models.quantization import quantize_weights_on_gpu, validate_quantization
from vargen.models.storage import load_network
from vargen.pipelines.default_format import default_quantization
from vargen.pipelines.families import FAMILIES, STORED_VALUES, ModelFamily, StoredComponent
from vargen.pipelines.model_names import FETCHING, locate_folder
from vargen.pipelines.prompts import PromptNames
from vargen.values import short_repr
from vargen.weight_files import find_weight_files, read_header

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

SHARED_FILE, SHAREABLE = "borrowed.json", ("text_encoder", "tokenizer", "prompt_names")
_LOADING = ("torch_dtype", "dtype", "quantization", "variant", "prompt_names")
_NO_EFFECT = ("use_safetensors", "low_cpu_mem_usage")  # common in calls of diffusers; vargen always does both
# Of image language models, in addition to those of the hub.
LANGUAGE_MODEL_OPTIONS = (
    "draft_model", "size", "negative_format", "device_map", "max_memory", "offload_folder", "quantization_config",
    "attn_implementation", "quantization", "vision_tokenizer",
)  # fmt: skip
_CODE = ("trust_remote_code", "custom_pipeline")
SMALL_NETWORK = 50_000_000  # parameters


@without_autocast
def open_pipeline(name: Any, *, device: str | torch.device | None = None, **options: Any) -> VisualPipeline:
    """Load a packaged model by name, a local folder, or a Hub model, of any family.

    Args:
        name: name of a packaged model, such as `"emoji"`; a folder with a `model_index.json`, or of transformers with an image
            language model; or a Hub id `"owner/name"`.
        device: such as `"cuda"`; `"auto"` selects a GPU if there is one; None: the CPU. The default dtype is its fastest.
        **options: passed to `from_pretrained` of the pipeline's class, such as `torch_dtype` or `quantization`. Without either,
            a model on a CPU has `default_quantization`, but where there is a GPU, to which it may be moved, only with
            `device="cpu"`. `quantization=None` runs it in floating point.
    """
    place = None if device is None else select_device(device)
    check_options(options, *list_families().values(), more=LANGUAGE_MODEL_OPTIONS)
    folder = locate_folder(name, options)
    pipeline = find_pipeline_class(folder)
    if pipeline.family.name == "language-model":
        unset = {name for name in (*_LOADING, *_CODE) if not options.get(name)}
        options = {name: value for name, value in options.items() if name not in {*_NO_EFFECT, *unset}}
        return pipeline.from_pretrained(folder, device=place, **options)
    validate_quantization(options.get("quantization"), place)
    on_gpu = place is not None and place.type != "cpu"
    if on_gpu and stored_quantization(folder / "transformer"):
        raise ValueError(f"{folder} is stored for 8-bit integer products on CPUs, got device {str(place)!r}")
    format_on_gpu = options.pop("quantization", None) if on_gpu else None
    network_class = pipeline.family.components["transformer"].network_class
    if format_on_gpu is not None and "quantization" not in signature(network_class.__init__).parameters:
        raise ValueError(f"quantization={format_on_gpu!r} is not supported by {network_class.__name__}; leave it out")
    chosen = any(options.get(name) is not None for name in ("torch_dtype", "dtype", "quantization"))
    stays = not torch.cuda.is_available() if place is None else not on_gpu
    if stays and not chosen and "quantization" not in options:
        options["quantization"] = default_quantization(folder)
    if place is not None and not chosen and options.get("quantization") is None:
        options["torch_dtype"] = default_dtype(folder, place)
    pipe = pipeline.from_pretrained(folder, **options)
    if place is not None:
        pipe = pipe.to(place)
    if format_on_gpu is not None:
        for network in pipe.components.values():
            if "quantization" in getattr(network, "config", ()):
                quantize_weights_on_gpu(network, format_on_gpu)
    return pipe


def inspect_model(name: Any) -> VisualPipeline:
    """Return the pipeline of a model without weights, with networks on the meta device."""
    folder = locate_folder(name, {})
    return find_pipeline_class(folder).inspect(folder)


def find_pipeline_class(name: Any) -> type[VisualPipeline]:
    """Return the pipeline class of a model. Reads only its index."""
    folder = locate_folder(name, {})
    if (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
        from vargen.pipelines.language_model import LanguageModelPipeline  # which imports transformers

        return LanguageModelPipeline
    return read_index(folder)[1].pipeline


def list_families() -> dict[str, ModelFamily]:
    """Return all families by the name of their pipeline class."""
    for name in ("llamagen", "var", "infinity", "causal_video"):
        importlib.import_module(f"vargen.pipelines.{name}")
    return FAMILIES


@dataclass(frozen=True)
class ModelFolder:
    """A model folder whose components were checked; no weight was read.

    Attributes:
        stored: its components by name, without those that the caller passes.
        values: the values stored with them, see `STORED_VALUES`, and `prompt_names`.
    """

    path: Path
    family: ModelFamily
    stored: Mapping[str, StoredComponent]
    values: Mapping[str, Any]


def read_model_folder(name: Any, family: ModelFamily, options: Mapping[str, Any] | None = None) -> ModelFolder:
    """Find a model and check its files; `options` are arguments of `from_pretrained`."""
    options = options or {}
    check_options(options, family)
    path = locate_folder(name, options)
    (index, found), file = read_index(path), path / "model_index.json"
    if found.pipeline is not family.pipeline:
        raise ValueError(f"{file} describes a {found.pipeline.__name__!r}, this class opens {family.pipeline.__name__!r}")
    names, places = family.read_index(index, file, options), shared_component_folders(path)
    stored: dict[str, StoredComponent] = {}
    for part, component in family.components.items():
        known, given, place = component.named_classes, options.get(part), places.get(part, path)
        if given is not None and not {each.__name__ for each in type(given).__mro__} & known.keys():
            raise TypeError(f"{part} must be a {' or '.join(known)}, got {short_repr(given)}")
        if part not in options and part in names:
            stored[part] = component.read(place / part, names[part], options.get("variant"))
    configs: dict[str, Any] = {part: getattr(each, "config", None) for part, each in {**stored, **options}.items()}
    values: dict[str, Any] = {each: options.get(each, index.get(each)) for each in STORED_VALUES}
    try:
        family.check(configs, **values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    table = places.get("prompt_names", path)
    values["prompt_names"] = options["prompt_names"] if "prompt_names" in options else PromptNames.load(table)
    return ModelFolder(path, family, stored, {name: value for name, value in values.items() if value is not None})


def read_index(path: Path) -> tuple[Mapping[str, Any], ModelFamily]:
    """Return the `model_index.json` of a folder and its family."""
    file = path / "model_index.json"
    if not file.is_file():
        hint = "`vargen convert` makes one of official files"
        if (path / "config.json").is_file():
            hint = "it may be a model of transformers, which only open_pipeline and the commands for images open"
        raise ValueError(f"{path} holds no model_index.json, so it is not a pipeline folder; {hint}")
    index, families = read_config(file), list_families()
    if (class_name := str(index.get("_class_name"))) not in families:
        raise ValueError(f"{file} describes a {class_name!r}; vargen opens {', '.join(families)}")
    return index, families[class_name]


def check_options(options: Mapping[str, Any], *families: ModelFamily, more: Collection[str] = ()) -> None:
    """Raise TypeError for an option that no family has, ValueError for one that requests code."""
    known = dict.fromkeys((*_LOADING, *FETCHING, *(name for family in families for name in family.components)))
    if unknown := [name for name in options if name not in (*known, *_NO_EFFECT, *_CODE, *STORED_VALUES, *more)]:
        raise TypeError(f"{unknown[0]} is no argument for opening a pipeline; allowed are {', '.join(known)}")
    if options.get("use_safetensors") is False:
        raise ValueError("use_safetensors must be True or left out: other weight files are not opened")
    if code := [name for name in _CODE if options.get(name)]:
        raise ValueError(f"{code[0]} must be left out, got {options[code[0]]!r}: vargen runs no code that comes with a model")


def shared_component_folders(folder: Path) -> dict[str, Path]:
    """Return, by name of a shared component, the folder of the packaged model that has it."""
    file = folder / SHARED_FILE
    shared = read_object(file) if file.is_file() else {}
    for part, name in shared.items():
        if part not in SHAREABLE or not isinstance(name, str) or name not in packaged_models():
            raise ValueError(f"{file} must name packaged models for {', '.join(SHAREABLE)}, got {short_repr({part: name})}")
        if (packaged_model_path(name) / SHARED_FILE).exists():
            raise ValueError(f"{file} takes {part} from {name}, which has no {part} of its own")
    return {part: packaged_model_path(name) for part, name in shared.items()}


def default_dtype(folder: Path, device: str | torch.device = "cpu") -> torch.dtype:
    """Return the fastest dtype of a device for a folder's transformer; float32 for a small or quantized one on a CPU.

    bfloat16 gains a small network little, and in it `auto` and `ar` no longer generate the same image for a seed.
    """
    if torch.device(device).type == "cpu":
        if stored_quantization(folder / "transformer"):
            return torch.float32
        whole = (folder / "config.json").is_file()  # a folder of transformers, which has its weights itself
        place, stem = (folder, "model") if whole else (folder / "transformer", WEIGHTS_STEM)
        files = find_weight_files(place, stem) if place.is_dir() else []
        if sum(math.prod(info.shape) for file in files for info in read_header(file).values()) < SMALL_NETWORK:
            return torch.float32
    return preferred_dtype(device)


def load_components(
    model: ModelFolder,
    dtype: torch.dtype | dict[str, torch.dtype] | None,
    quantization: str | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Read the weights of components, and return these with the ones that the caller passes.

    Args:
        dtype: of the components that follow it, or a dict of dtypes by component (`"default"` for those not named), as in
            diffusers. Default: the fastest of the machine. The other steps of quantized networks are float32.
        quantization: format of the products of the networks that have one. Default: as stored.
        given: components that the caller passes.
    """
    if quantization is not None and given.get("transformer") is not None:
        raise ValueError("quantization must be left out beside a transformer: pass one that is quantized")
    own: dict[str, torch.dtype] = dtype if isinstance(dtype, dict) else {} if dtype is None else {"default": dtype}
    for each in own.values():
        if not isinstance(each, torch.dtype) or not each.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype, or a dict of them by component, got {dtype!r}")
    asked = usual = own.get("default")
    if asked is None and "transformer" in model.stored:
        usual = default_dtype(model.path, "cuda" if torch.cuda.is_available() else "cpu")
    found = {part: given[part] for part in model.family.components if part in given}
    for part, stored in model.stored.items():
        if isinstance(stored, TokenizerFolder):
            found[part] = stored.load()
            continue
        follows = model.family.components[part].follows(stored.network_class.__name__)
        is_ours = isinstance(stored, NetworkFolder) and (part == "transformer" or "quantization" in stored.config)
        kind = (quantization or stored.config.get("quantization")) if is_ours else None
        default = asked if kind else usual if follows else asked if isinstance(dtype, dict) else None
        chosen = own.get(part, default) or torch.float32
        found[part] = load_network(stored, chosen, kind) if isinstance(stored, NetworkFolder) else stored.load(chosen)
    return found


def stored_quantization(folder: Any) -> str | None:
    """Return the format that a component was saved in; None for floating point."""
    try:
        return read_object(folder / "config.json").get("quantization")
    except ValueError:  # reported when the folder is validated
        return None


def resolve_drafter(name: Any, family: ModelFamily) -> tuple[str, NetworkFolder]:
    """Return the component name of a trained drafter and its folder; `name` as of `load_drafter`."""
    root = Path(vargen.assets.__file__).parent
    files = [file for each in family.trainable for file in sorted(root.rglob(f"{each}/config.json"))]
    packaged = {file.parent.relative_to(root).as_posix(): file.parent for file in files}  # by name, such as "emoji/eagle"
    folder = packaged.get(str(name)) or expand_user(name, "drafter")
    if not os.path.isdir(folder):
        known, given = ", ".join(packaged) or "none is packaged", short_repr(str(name))
        raise ValueError(f"drafter must be a folder with a trained drafter, or a packaged one ({known}), got {given}")
    runs = sorted({folder / str(each.run_folder) for each in family.trainable.values()})
    folder = next((place for place in (folder, *runs) if (place / "config.json").is_file()), folder)
    kinds = {each.network_class.__name__: part for part, each in family.trainable.items()}
    class_name = read_object(folder / "config.json").get("_class_name")
    if not isinstance(class_name, str) or class_name not in kinds:
        classes = ", ".join(kinds) or "none"
        raise ValueError(f"{folder} holds a {class_name!r}; drafters of a {family.pipeline.__name__} are {classes}")
    part = kinds[class_name]
    return part, NetworkFolder(folder, family.components[part].network_class)
