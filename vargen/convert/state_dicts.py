"""Official checkpoint files. Pickles are read weights-only: no code in them is executed."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.compat import installed_version
from vargen.weight_files import list_shapes, load_pickle_safely, read_header, read_index, validate_shapes

logger = logging.getLogger("vargen")
State = dict[str, Tensor]

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
# Keys, or prefixes of names, under which training programs keep weights: as trained, and averaged over steps.
_TRAINED = ("model", "module", "state_dict", "model_state_dict", "gpt", "net", "params", "generator", "online_model", "sd")
_AVERAGED = ("ema", "ema_model", "model_ema", "params_ema", "generator_ema", "ema_state_dict", "model_ema_state_dict")
_TRAINING_ONLY = ("discriminator", "disc", "loss", "perceptual_loss", "lpips")  # prefixes of other networks
_COUNTERS = {"initted", "step"}  # beside averaged weights
_MAX_DEPTH = 6  # of nested keys
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # parts of names, anywhere in them


class _Ignored:
    """Stands in for a value beside the tensors, whose content is not needed and is not interpreted."""

    def __new__(cls, *_: Any) -> _Ignored:
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


# What training files hold beside tensors, by its names in pickles: paths, of Python 3.13, too, and values of NumPy, whose own
# classes are not let in: their `__setstate__` is not made for data that nobody vouches for.
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_NUMPY = (
    "dtype",
    "ndarray",
    *(f"{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
)
_IGNORED = [f"numpy.{name}" for name in _NUMPY] + [
    f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS
]


def read_checkpoint(file: Path, prefer: str | Sequence[str] = ()) -> State:
    """Return the tensors of a network under their plain names, from wherever training programs keep them.

    They may be at the top, or under keys or prefixes of `_TRAINED` and `_AVERAGED`, also nested. Of several, those under
    `prefer` are taken, else trained weights before averaged ones, and a warning says so. Weights of a discriminator and of
    losses are left out. A `.pt` file of the current format is memory-mapped: tensors are loaded when they are used.

    Args:
        file: a checkpoint, or the index (`.index.json`) of its parts.
        prefer: keys in order of preference; `"ema"` stands for all averaged weights.
    """
    content: Mapping[Any, Any] = _read_parts(file) if file.name.lower().endswith(_INDEX) else read_file(file)
    preferred = (prefer,) if isinstance(prefer, str) else tuple(prefer)
    order = dict.fromkeys(("trainer", *preferred, *(_AVERAGED if "ema" in preferred else ()), *_TRAINED, *_AVERAGED))
    for _ in range(_MAX_DEPTH):
        content = _nest_prefixes(content, file)
        inner = {place: content[place] for place in order if isinstance(content.get(place), Mapping)}
        found = [place for place, each in inner.items() if any(isinstance(value, Tensor | Mapping) for value in each.values())]
        if not found:
            break
        if len(found) > 1:
            unused = ", ".join(found[1:])
            logger.warning("%s holds weights under %s, which are converted, and under %s", file, found[0], unused)
        content = content[found[0]]
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        held = f"more than tensors at its top ({', '.join(others[:5])})" if others else "no tensors"
        raise ValueError(f"{file} holds {held}; expected tensors, bare or under one of {', '.join(_TRAINED)}")
    if odd := [name for name, value in content.items() if not _is_plain(value)]:
        raise ValueError(f"{odd[0]} in {file} is sparse, nested, quantized, empty or incomplete")
    return {name: value.detach() for name, value in content.items()}


def read_file(file: Path) -> Mapping[Any, Any]:
    """Return the content of a safetensors file or a pickle."""
    suffix = file.suffix.lower()
    if suffix not in (*_PICKLES, ".safetensors") or not file.is_file():
        allowed = f"{', '.join(_PICKLES)}, .safetensors or an index of them ({_INDEX})"
        raise ValueError(f"{file} is not a checkpoint file, which is {allowed}")
    if suffix == ".safetensors":
        read_header(file)  # its message is clearer than the loader's
        return load_file(file)
    # Training checkpoints keep their command-line arguments in a Namespace, which only holds attributes.
    ignored = [(type(name, (_Ignored,), {}), name) for name in _IGNORED]
    content = load_pickle_safely(file, [argparse.Namespace, *ignored], mmap=True)
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, expected tensors by name")
    return content


def _read_parts(index: Path) -> State:
    """Return the tensors of the files that an index names."""
    weight_map, state = read_index(index), State()
    for name in sorted(set(weight_map.values())):
        part = read_file(index.parent / name)
        if part.keys() != {key for key, value in weight_map.items() if value == name}:
            raise ValueError(f"{index.parent / name} does not hold the tensors that {index.name} names")
        state |= part
    return state


def _nest_prefixes(content: Mapping[Any, Any], file: Path) -> dict[str, Any]:
    """Return tensors whose names all begin with a place as nested under it; other content with plain names."""
    if not all(isinstance(value, Tensor) for value in content.values()):
        return {str(name): value for name, value in content.items()}
    named = {_plain_name(str(name)): value for name, value in content.items()}
    if len(named) != len(content):
        raise ValueError(f"{file} holds a tensor twice, with and without a prefix such as 'module.' or '_orig_mod.'")
    kept = {name: value for name, value in named.items() if name.partition(".")[0] not in _TRAINING_ONLY} or named
    nested: dict[str, Any] = {}
    for name in kept.keys() - _COUNTERS:
        place, _, rest = name.partition(".")
        if not rest or place not in (*_TRAINED, *_AVERAGED):
            return kept
        nested.setdefault(place, {})[rest] = kept[name]
    return nested


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor is not empty and has all its entries in memory."""
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        return False
    return 0 < value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _plain_name(name: str) -> str:
    """Strip what distributed training, activation checkpointing and torch.compile add to a parameter's name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def build_network(
    kind: Callable[..., nn.Module],
    config: dict[str, Any],
    state: State,
    file: Path,
    dtype: torch.dtype | None = None,
) -> Any:
    """Build `kind(**config)` with the tensors of `state` as its weights, cast to `dtype` if given."""
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be None, torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}")
    network = describe_network(kind, config, state, file)
    placed: State = {}
    storages: set[int] = set()
    for name, value in state.items():
        weight = value.to(dtype or value.dtype).contiguous()
        if not weight.isfinite().all():
            reason = f"does not fit {dtype}" if value.isfinite().all() else "holds NaN or infinite numbers"
            raise ValueError(f"{name} in {file} {reason}")
        storage = weight.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != weight.nbytes:
            weight = weight.clone()  # safetensors cannot save views of one buffer as separate tensors
        storages.add(weight.untyped_storage().data_ptr())
        placed[name] = weight
    network.load_state_dict(placed, strict=True, assign=True)
    return network


def describe_network(kind: Callable[..., nn.Module], config: dict[str, Any], state: State, file: Path) -> Any:
    """Return `kind(**config)` on the meta device, if names and shapes of its tensors fit."""
    try:
        with torch.device("meta"):
            network = kind(**config)
    except ValueError as error:
        raise ValueError(f"{file} does not describe a network that this library has: {error}") from error
    validate_shapes(list_shapes(state), list_shapes(network.state_dict()), str(file))
    for name, value in state.items():
        if value.dtype not in _FLOATS:
            raise ValueError(f"{name} in {file} is {value.dtype}, expected floating-point numbers of 16 to 64 bits")
    return network


def require_shape(state: State, file: Path, kind: str, name: str, dims: int = 2) -> Any:
    """Return the shape of a tensor of `dims` dimensions that every network of a `kind` has."""
    if name not in state:
        raise ValueError(f"{file} is not a {kind}: it has no {name}")
    if state[name].dim() != dims:
        raise ValueError(f"{file} is not a {kind}: its {name} is {list(state[name].shape)}")
    return state[name].shape


def require_equal(both: str, *pairs: tuple[str, int, int]) -> None:
    """Raise ValueError unless `both` files have the same numbers: what is counted, in one and in the other."""
    for what, one, other in pairs:
        if one != other:
            raise ValueError(f"{both} do not belong together: they have {one} and {other} {what}")


def count_modules(state: State, prefix: str) -> int:
    """Return the number of entries after `prefix`."""
    return len({key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)})


def require_inputs(**inputs: Path | None) -> None:
    """Raise an error that names an argument whose file or folder does not exist; None means not given."""
    for name, path in inputs.items():
        kind = "folder" if name in ("text_encoder", "tokenizer", "wan") else "file"
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{name} {str(path)!r} does not exist")
        if path is not None and not (path.is_dir() if kind == "folder" else path.is_file()):
            raise ValueError(f"{name} must be a {kind}, got {str(path)!r}")


def write_image_model(
    folder: Path, pipeline: str, parts: Mapping[str, Any], defaults: Mapping[str, Any], id2label: Path | None
) -> None:
    """Write components and index of an image model; `defaults` without a top-k that exceeds the vocabulary."""
    config = parts["transformer"].config
    labels = None if id2label is None else read_labels(id2label, config.num_classes)
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    fitting = {name: value for name, value in defaults.items() if name != "top_k" or value <= config.vocab_size}
    write_model_index(folder, pipeline, parts, id2label=labels, defaults=fitting, prompt_styles=None)


def write_model_index(folder: Path, pipeline: str, parts: Mapping[str, Any], **values: Any) -> None:
    """Write `model_index.json` of components or their classes by name."""
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": installed_version("diffusers"), **values}
    for name, part in parts.items():
        kind = part if isinstance(part, type) else type(part)
        library = kind.__module__.partition(".")[0]
        index[name] = [library if library in ("diffusers", "transformers") else kind.__module__, kind.__name__]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def read_labels(file: Path, num_classes: int) -> dict[int, str]:
    """Read class names from a JSON file: `{"0": "name, synonym"}` or a list of names."""
    try:
        content = json.loads(file.read_text("utf-8"))
        items = enumerate(content) if isinstance(content, list) else content.items()
        labels = {int(number): names if isinstance(names, str) else ", ".join(names) for number, names in items}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not JSON of the form {{number: names}} or [names]: {error}") from error
    if outside := [number for number in labels if not 0 <= number < num_classes]:
        raise ValueError(f"{file} names class {outside[0]}, but the transformer has classes 0 to {num_classes - 1}")
    return labels
