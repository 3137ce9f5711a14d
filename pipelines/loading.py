"""What a model folder must be before any of its weights is loaded."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn

from vargen.assets import packaged_model_path, packaged_models
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.vq import VQModel
from vargen.models.weights import check_weights, header_shapes

# Folders may name classes of these libraries only: anything else would be code from a stranger.
_TRUSTED = ("diffusers", "transformers", "vargen.")
_SMALL = 50_000_000  # parameters
_CHECKED: dict[str, type] = {
    "transformer": LlamaGenTransformer,
    "draft_transformer": LlamaGenTransformer,
    "vqvae": VQModel,
}
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md"]  # of a hub model: nothing that could run


def fast_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 where hardware multiplies it; float32 on a CPU without such instructions, where bfloat16 is 7 times slower."""
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def default_dtype(folder: Path, device: str | torch.device = "cpu") -> torch.dtype:
    """The fastest dtype of a device for the transformer in a pipeline folder; float32 for a small one on a CPU.

    Passes of a small network are bound by the number of operations, so bfloat16 brings it little, and costs it the promise that
    a seed is a picture: a pass over more tokens rounds differently, and then `auto` and `ar` draw different pictures.
    """
    if torch.device(device).type == "cpu":
        shapes = [shape for file in (folder / "transformer").glob("*.safetensors") for shape in header_shapes(file).values()]
        if sum(math.prod(shape) for shape in shapes) < _SMALL:
            return torch.float32
    return fast_dtype(device)


def pick_device(name: str) -> torch.device:
    """The device to run on; `"auto"` takes a GPU where there is one.

    Raises:
        ValueError: for `"cuda"` where torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU; give --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions: AVX-512 BF16, AMX, or Arm's. False where torch cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def component_dtypes(folder: Path, given: torch.dtype | dict[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """Per component: what is `given`, or the fastest, for the transformer and a T5 text encoder; float32 for the rest.

    Args:
        given: a dtype, or dtypes by component (`"default"` for those not named), as diffusers has them.

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
    dtypes = {"transformer": dtype, "draft_transformer": dtype, "default": torch.float32}
    return {**dtypes, **({"text_encoder": dtype} if large else {}), **own}


def checked_folder(name: Any, pipeline: str, hub_options: dict[str, Any]) -> Path:
    """The folder of a packaged model, a local one, or a hub model's, checked without loading a weight.

    Raises:
        ValueError: unknown name; no or foreign `model_index.json`; missing, damaged or foreign-shaped weights.
    """
    folder = _locate(name, hub_options)
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        raise ValueError(
            f"{folder} holds no model_index.json, so it is not a pipeline folder. "
            "For official LlamaGen files run `vargen convert llamagen --transformer FILE --vq FILE --output DIR` first"
        )
    try:
        index = json.loads(index_file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index_file} is not valid JSON: {error}") from error
    if not isinstance(index, dict) or index.get("_class_name") != pipeline:
        named = index.get("_class_name") if isinstance(index, dict) else None
        raise ValueError(f"{index_file} describes a {named!r}, this class opens {pipeline!r}")
    for component, value in index.items():
        if isinstance(value, list) and len(value) == 2 and value[0] is not None:
            library = str(value[0])
            if library not in _TRUSTED and not library.startswith(_TRUSTED[-1]):
                raise ValueError(f"{index_file} takes {component!r} from {library!r}; only {', '.join(_TRUSTED)} are trusted")
    variant = hub_options.get("variant")
    index = {name: value for name, value in index.items() if name not in hub_options}  # a caller's own need no file
    for component, kind in _CHECKED.items():
        if (index.get(component) or [None])[0] is not None:
            check_component(folder / component, kind, variant)
    encoder, kind_of_encoder = index.get("text_encoder") or (None, None)
    if kind_of_encoder == MiniLMTextEncoder.__name__:
        check_component(folder / "text_encoder", MiniLMTextEncoder, variant)
    elif encoder is not None:  # of transformers, which names tensors anew as it loads: the headers alone are checked
        check_headers(folder / "text_encoder")
    return folder


def check_headers(folder: Path) -> None:
    """Raise ValueError unless `folder` has a config and weights in safetensors files, none of them damaged."""
    files = sorted(folder.glob("*.safetensors"))
    for needed, there in (("config.json", (folder / "config.json").is_file()), ("model.safetensors", bool(files))):
        if not there:
            raise ValueError(f"{folder / needed} is missing; the folder is incomplete, download or convert it again")
    for file in files:
        header_shapes(file)


def check_component(folder: Path, kind: type, variant: str | None = None) -> None:
    """Compare a component's weight file with the network that its config describes, by header only.

    Args:
        variant: part of the weight file's name, such as "fp16", as diffusers has it.

    Raises:
        ValueError: naming the file and the first tensors that are wrong.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{config_file} is missing; the folder is incomplete, download or convert it again")
    try:
        config = kind.load_config(str(folder))  # type: ignore[attr-defined]
        with torch.device("meta"):
            network: nn.Module = kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:
        raise ValueError(f"{config_file} does not describe a {kind.__name__}: {error}") from error
    if isinstance(network, MiniLMTextEncoder):
        expected = network.stored_shapes()
    else:
        expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    check_weights(folder, "diffusion_pytorch_model", expected, variant)


def _locate(name: Any, hub_options: dict[str, Any]) -> Path:
    text = str(name)
    if text in packaged_models():
        return packaged_model_path(text)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    hub_like = text.count("/") == 1 and not text.startswith((".", "/", "~"))
    if not hub_like:
        near = difflib.get_close_matches(text, packaged_models(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown model {text!r}: {hint}give a packaged model ({', '.join(packaged_models()) or 'none'}), "
            "a folder with a model_index.json, or a hub id 'owner/name'"
        )
    known = ("cache_dir", "force_download", "local_files_only", "token", "revision")
    options = {key: hub_options[key] for key in known if key in hub_options}
    try:  # not DiffusionPipeline.download, which refuses components that are classes of neither diffusers nor transformers
        return Path(snapshot_download(text, allow_patterns=_WANTED, **options))
    except Exception as error:
        raise ValueError(
            f"no local folder {text!r} exists, and fetching the hub model of that name failed: {error}"
        ) from error
