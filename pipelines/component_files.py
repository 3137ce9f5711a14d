"""Validation of a component's folder without loading weights: configuration, headers of weight files, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vargen.files import expand_user
from vargen.models.described import check_described, read_object
from vargen.pipelines.components import check_no_code, check_no_code_keys
from vargen.weight_files import check_dtypes, check_layer_counts, read_header

_AGAIN = "the folder is incomplete, download or convert it again"
# Files with the vocabulary of a tokenizer, any one of which suffices.
_VOCABULARIES = {
    "BertTokenizer": ("tokenizer.json", "vocab.txt"),
    "T5Tokenizer": ("tokenizer.json", "spiece.model"),
}


def resolve_network_folder(folder: Any, part: str, name: str) -> Path:
    """Return the folder of a saved network: the subfolder `part` of a training run, or the given folder itself.

    Raises:
        FileNotFoundError: if there is no network; the message names the argument `name`.
        ValueError: if the folder contains code.
    """
    given = expand_user(folder, name)
    for place in (given / part, given):
        if (place / "config.json").is_file():
            check_no_code(place)
            return place
    raise FileNotFoundError(f"{name} must be a run's folder with {part}/, or a saved network, got {str(given)!r}")


def check_component(folder: Path, kind: type, variant: str | None = None) -> Mapping[str, Any]:
    """Compare the header of a component's weight file with the network that its configuration describes.

    Args:
        variant: variant in the weight file's name, such as "fp16", as in diffusers.

    Returns:
        The configuration, including default values that the file omits.

    Raises:
        ValueError: for a mismatch; the message names the file and the first wrong tensors.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    return check_described(kind, config, folder, variant)


def check_t5(folder: Path) -> Mapping[str, Any]:
    """Validate a T5 text encoder. Tensor names are not compared, because transformers renames tensors while loading.

    Returns:
        Its configuration.

    Raises:
        ValueError: if the configuration is missing, not T5 or does not match the weights in size, or if weights are missing,
            damaged or not floating-point.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    if config.get("model_type") != "t5":
        raise ValueError(f"{file} has model_type: {config.get('model_type')!r}, expected 't5'")
    adapter = folder / "adapter_config.json"
    if adapter.exists():  # transformers would download the base model that it names
        raise ValueError(f"{adapter} makes this the adapter of another model; merge it into the encoder's weights")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder / 'model.safetensors'} is missing; {_AGAIN}")
    found = {name: stored for weight in weights for name, stored in read_header(weight).items()}
    check_layer_counts(found, config, {"num_layers": ("encoder.block.",)}, file)
    if not config.get("quantization_config"):  # quantized weights have other dtypes
        check_dtypes(found, str(folder))
    return config


def check_tokenizer(folder: Path, kind: str) -> None:
    """Validate a tokenizer's files. Without them, transformers reports that another library is missing, which misleads.

    Args:
        kind: class name of the tokenizer.

    Raises:
        ValueError: if a file is missing or damaged.
    """
    from tokenizers import Tokenizer

    needed = _VOCABULARIES.get(kind.removesuffix("Fast"), ("tokenizer.json",))
    if not any((folder / name).is_file() for name in needed):
        others = "".join(f", and so is {name}" for name in needed[1:])
        raise ValueError(f"{folder / needed[0]} is missing{others}; {_AGAIN}")
    for file in (folder / name for name in needed):
        if file.is_file() and not file.read_bytes().strip():
            raise ValueError(f"{file} is empty and must hold a vocabulary; {_AGAIN}")
    for file in sorted(folder.glob("*.json")):
        if file.name != "tokenizer.json":
            check_no_code_keys(read_object(file), file)
            continue
        read_object(file)  # reports invalid JSON more clearly than the tokenizer
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file} is damaged or not a tokenizer: {error}; download or convert it again") from error
