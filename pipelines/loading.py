"""Opening a model folder: its place, its validation before any weight is loaded, dtypes, shared components, trained drafters.

A packaged model can share the text encoder of another packaged model instead of storing a copy. Its `borrowed.json` names the
model that has each shared component: `{"text_encoder": "emoji", "tokenizer": "emoji", "prompt_names": "emoji"}`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

import vargen.assets
from vargen.assets import packaged_model_path, packaged_models
from vargen.compat import load_options, report_memory
from vargen.device import preferred_dtype
from vargen.files import expand_user, validate_not_interrupted
from vargen.folders.component_files import read_config, read_object, refuse_code_files, validate_network_files
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.pipelines.components import FAMILIES, STORED_VALUES, ModelFamily, current_modules
from vargen.values import short_repr
from vargen.weight_files import read_header

SHARED_FILE, SHAREABLE = "borrowed.json", ("text_encoder", "tokenizer", "prompt_names")
_SMALL_NETWORK = 50_000_000  # parameters
_MAX_ID = 96  # characters of a model id on the Hub
_HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.md",
    "*.jinja",
]  # files to fetch: none that could be executed
# Arguments of diffusers' `from_pretrained` other than components. It ignores unknown ones silently.
_OPTIONS = frozenset(
    "torch_dtype dtype cache_dir force_download proxies local_files_only token revision variant use_safetensors device_map "
    "max_memory offload_folder offload_state_dict low_cpu_mem_usage disable_mmap quantization "
    "output_loading_info mirror trust_remote_code custom_pipeline custom_revision load_connected_pipeline use_onnx "
    "use_flashpack from_flax dduf_file provider sess_options provider_options".split()
)


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, its `model_index.json` with current module paths, and its family."""

    path: Path
    index: Mapping[str, Any]
    family: ModelFamily


def find_model_folder(name: Any, family: ModelFamily | None = None, options: Mapping[str, Any] | None = None) -> ModelFolder:
    """Locate the folder of a packaged, local or Hub model, and validate its index, but not its components.

    Args:
        name: name, folder or Hub id; or a `ModelFolder`.
        family: the family that the caller opens; None allows any.
        options: arguments of `from_pretrained`.
    """
    options = options or {}
    families = [family] if family else list(FAMILIES.values())
    check_options(options, {component for each in families for component in each.components})
    path = name.path if isinstance(name, ModelFolder) else locate_folder(name, options)
    file = path / "model_index.json"
    if not file.is_file():
        hint = "; `vargen convert` makes one of official files"
        if (path / "config.json").is_file():
            hint = "; it may be a model of transformers, which only open_pipeline and the commands for images open"
        raise ValueError(f"{path} holds no model_index.json, so it is not a pipeline folder{hint}")
    index = name.index if isinstance(name, ModelFolder) else read_config(file)
    class_name = str(index.get("_class_name"))
    if family is not None and class_name != family.pipeline.__name__:
        raise ValueError(f"{file} describes a {class_name!r}, this class opens {family.pipeline.__name__!r}")
    if class_name not in FAMILIES:
        raise ValueError(f"{file} describes a {class_name!r}; vargen opens {', '.join(FAMILIES)}")
    family = FAMILIES[class_name]
    check_options(options, family.components)
    index = current_modules(index, family)
    family.validate_index(index, file, options)
    return ModelFolder(path, index, family)


def validate_model_folder(
    name: Any, family: ModelFamily | None = None, options: Mapping[str, Any] | None = None
) -> ModelFolder:
    """Locate a model as `find_model_folder` does, and validate its components without loading weights."""
    options = options or {}
    folder = find_model_folder(name, family, options)
    refuse_code_files(folder.path, folder.family.components)
    with report_memory(folder.path):  # reading a header maps the whole file
        places = shared_component_folders(folder.path)
        configs: dict[str, Any] = {}
        for part, component in folder.family.components.items():
            entry = folder.index.get(part) or [None, None]
            if part in options:
                configs[part] = getattr(options[part], "config", None)
            elif entry[1]:
                place = places.get(part, folder.path) / part
                configs[part] = component.validate_files(place, entry, options.get("variant"))
    values = {each: options.get(each, folder.index.get(each)) for each in STORED_VALUES}
    try:
        folder.family.check(configs, **values)
    except ValueError as error:
        raise ValueError(f"{folder.path / 'model_index.json'}: {error}") from error
    return folder


def check_options(options: Mapping[str, Any], components: Collection[str]) -> None:
    """Raise ValueError for options of `from_pretrained` that request remote code, TypeError for unknown options."""
    known = [*_OPTIONS, *STORED_VALUES, "prompt_names", *components]
    for name in options:
        if name not in known:
            raise TypeError(
                f"{name} is no argument for opening a pipeline: it takes options of DiffusionPipeline.from_pretrained "
                f"and the components {', '.join(sorted(components))}"
            )
    for name in ("trust_remote_code", "custom_pipeline"):
        if options.get(name):
            raise ValueError(f"{name} must be left out, got {options[name]!r}: vargen runs no code that comes with a model")


def locate_folder(name: Any, options: Mapping[str, Any]) -> Path:
    """Return the folder of a packaged, local or Hub model."""
    text = str(name)
    if text in packaged_models():
        return packaged_model_path(text)
    path = expand_user(name, "model")
    if os.path.isdir(path):  # Path.is_dir would raise if the name is too long for a file name
        return path
    validate_not_interrupted(path)
    if text.count("/") != 1 or text.startswith((".", "/", "~")) or len(text) > _MAX_ID:
        near = get_close_matches(text, packaged_models(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown model {short_repr(text)}: {hint}give a packaged model ({', '.join(packaged_models()) or 'none'}), "
            "a folder with a model_index.json, or a hub id 'owner/name'"
        )
    known = ("cache_dir", "force_download", "local_files_only", "token", "revision")
    given = {key: options[key] for key in known if key in options}
    try:  # not DiffusionPipeline.download, which accepts only components of diffusers and transformers
        return Path(snapshot_download(text, allow_patterns=_HUB_PATTERNS, **given))
    except Exception as error:
        raise ValueError(f"no local folder {text!r} exists, and fetching the hub model of that name failed: {error}") from error


def default_dtype(folder: Path, device: str | torch.device = "cpu") -> torch.dtype:
    """Return the fastest dtype of a device for the transformer of a pipeline folder; float32 for a small or quantized one on a
    CPU.

    Passes of a small network are bound by the number of operations, so bfloat16 gains little. It also makes images depend on
    the method: a pass over more tokens rounds differently, so `auto` and `ar` no longer generate the same image for a seed.
    """
    if torch.device(device).type == "cpu":
        if stored_quantization(folder / "transformer"):
            return torch.float32
        whole = (folder / "config.json").is_file()  # a folder of transformers, which has its weights itself
        files = (folder if whole else folder / "transformer").glob("*.safetensors")
        if sum(math.prod(info.shape) for file in files for info in read_header(file).values()) < _SMALL_NETWORK:
            return torch.float32
    return preferred_dtype(device)


def resolve_dtypes(
    folder: ModelFolder, given: torch.dtype | dict[str, torch.dtype] | None, quantized: Collection[str] = ()
) -> dict[str, torch.dtype]:
    """Return the dtype of each component: that of the caller or, by default, the fastest one for those that follow it, float32
    for the others.

    Args:
        given: a dtype, or a dict of dtypes by component (`"default"` for those not named), as in diffusers.
        quantized: components with 8-bit integer products, whose other steps are float32.
    """
    own: dict[str, torch.dtype] = given if isinstance(given, dict) else {}
    for dtype in own.values() if own else () if given is None else (given,):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype, or a dict of them by component, got {given!r}")
    fast = default_dtype(folder.path, "cuda" if torch.cuda.is_available() else "cpu")
    dtype = given if isinstance(given, torch.dtype) else own.get("default", fast)
    components = folder.family.components.items()
    following = [name for name, each in components if each.follows(folder.index.get(name) or ())]
    found = {"default": torch.float32, **dict.fromkeys(following, dtype), **own}
    for name in quantized:
        asked = own.get(name, own.get("default", given))
        if asked not in (None, torch.float32):
            raise ValueError(
                f"dtype must be float32 for {name} with quantization='int8', whose other steps compute in it, got {asked}"
            )
        found[name] = torch.float32
    return found


def shared_component_folders(folder: Path) -> dict[str, Path]:
    """Return, by name of a shared component, the folder of the packaged model that has it."""
    file = folder / SHARED_FILE
    shared = read_object(file) if file.is_file() else {}
    for part, name in shared.items():
        if part not in SHAREABLE or not isinstance(name, str) or name not in packaged_models():
            known = ", ".join(packaged_models()) or "none"
            raise ValueError(
                f"{file} must name packaged models ({known}) for {', '.join(SHAREABLE)}, and has {short_repr({part: name})}"
            )
        if (packaged_model_path(name) / SHARED_FILE).exists():
            raise ValueError(f"{file} takes {part} from {name}, which has no {part} of its own")
    return {part: packaged_model_path(name) for part, name in shared.items()}


def load_text_components(
    folder: ModelFolder, given: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], variant: str | None
) -> dict[str, Any]:
    """Load the components of transformers, and those of another packaged model, except those that the caller passes in `given`.

    diffusers would follow what their files say: classes, paths and code.
    """
    shared, found = shared_component_folders(folder.path), dict[str, Any]()
    for part in ("text_encoder", "tokenizer"):
        component, entry = folder.family.components.get(part), folder.index.get(part) or [None, None]
        if component is None or part in given or (entry[1] is None and part not in shared):
            continue
        place = shared.get(part, folder.path)
        entry = entry if entry[1] is not None else read_config(place / "model_index.json")[part]
        if entry[1] == MiniLMTextEncoder.__name__:
            if part in shared:
                found[part] = MiniLMTextEncoder.from_pretrained(place / part)
        else:
            found[part] = component.load_foreign(place / part, entry, dtypes.get(part, dtypes["default"]), variant)
    return found


def quantized_components(folder: ModelFolder, quantization: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of the components that are quantized in a model folder, or become so by a request, by name.

    Args:
        given: components that the caller passes, which are left as they are.
    """
    found: dict[str, str] = {}
    for part, component in folder.family.components.items():
        network: Any = component.network_class
        if not isinstance(network, type) or "quantization" not in signature(network).parameters or part in given:
            if part == "transformer" and quantization is not None and part not in given:
                name = getattr(network, "__name__", network)
                raise ValueError(f"quantization={quantization!r} is not supported by {name}; leave it out")
            continue
        entry = folder.index.get(part) or [None, None]
        if entry[1] is not None and (kind := quantization or stored_quantization(folder.path / part)):
            found[part] = kind
    return found


def stored_quantization(folder: Any) -> str | None:
    """Return the format that a component was saved in; None for floating point."""
    try:
        return read_object(folder / "config.json").get("quantization")
    except ValueError:  # reported when the folder is validated
        return None


def load_quantized_components(
    folder: ModelFolder, formats: Mapping[str, str], dtypes: Mapping[str, Any], variant: str | None
) -> dict[str, Any]:
    """Load the components with these formats; see `quantized_components`."""
    components = folder.family.components
    return {
        part: components[part].network_class.from_pretrained(
            folder.path / part, quantization=kind, torch_dtype=dtypes.get(part, dtypes["default"]), variant=variant
        )
        for part, kind in formats.items()
    }


def resolve_drafter(name: Any, family: ModelFamily) -> tuple[str, Path, Mapping[str, Any]]:
    """Return the component name of a trained network that drafts, such as `"eagle"`, its folder and its configuration.

    Args:
        name: name of a packaged one, its folder, or the folder of the training run.
    """
    root = Path(vargen.assets.__file__).parent
    files = [file for each in family.trainable for file in sorted(root.rglob(f"{each}/config.json"))]
    packaged = {file.parent.relative_to(root).as_posix(): file.parent for file in files}  # by name, such as "emoji/eagle"
    folder = packaged.get(str(name)) or expand_user(name, "drafter")
    if not os.path.isdir(folder):
        known, given = ", ".join(packaged) or "none is packaged", short_repr(str(name))
        raise ValueError(f"drafter must be a folder with a trained drafter, or a packaged one ({known}), got {given}")
    runs = {folder / str(each.run_folder) for each in family.trainable.values()}
    folder = next((place for place in (folder, *sorted(runs)) if (place / "config.json").is_file()), folder)
    class_name = read_object(folder / "config.json").get("_class_name")
    for component_name, component in family.trainable.items():
        if component.network_class.__name__ == class_name:
            refuse_code_files(folder)
            return component_name, folder, validate_network_files(folder, component.network_class)
    classes = ", ".join(each.network_class.__name__ for each in family.trainable.values()) or "none"
    raise ValueError(
        f"{folder / 'config.json'} describes a {class_name!r}; drafters of a {family.pipeline.__name__} are {classes}"
    )


def load_trained_networks(pipeline: Any, *names: Any) -> dict[str, Any]:
    """Load networks that were trained to draft for a pipeline's transformer, by component name; see `resolve_drafter`."""
    family = pipeline.family
    found = {name: (folder, config) for name, folder, config in (resolve_drafter(each, family) for each in names)}
    configs = {name: getattr(getattr(pipeline, name), "config", None) for name in family.components}
    try:
        family.check(configs | {name: config for name, (_, config) in found.items()})
    except ValueError as error:
        raise ValueError(f"{', '.join(str(folder) for folder, _ in found.values())}: {error}") from error
    for folder, config in found.values():
        codes = config.get("codes") and pipeline.vqvae and pipeline.vqvae.quantize.digest()
        if codes and codes != config["codes"]:
            digests = f"digest {config['codes']}, and this model's is {codes}"
            raise ValueError(
                f"{folder} belongs to another codebook ({digests}): give a network that was trained for this model"
            )
    networks = {}
    for name, (folder, _) in found.items():
        component = family.components[name]
        dtype = pipeline.transformer.dtype if component.follows_dtype else torch.float32
        options = {"torch_dtype": dtype, "use_safetensors": True, **load_options()}
        networks[name] = component.network_class.from_pretrained(folder, **options).eval()
    return networks
