"""A component's folder, checked without loading a weight: its configuration, its weight files' headers, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vargen.files import expand_user
from vargen.models.described import check_described, read_object
from vargen.pipelines.components import check_no_code, check_no_code_keys
from vargen.weight_files import check_dtypes, check_layer_counts, read_header

_AGAIN = "the folder is incomplete, download or convert it again"
# Any one of these holds a tokenizer's vocabulary.
_VOCABULARIES = {
    "BertTokenizer": ("tokenizer.json", "vocab.txt"),
    "T5Tokenizer": ("tokenizer.json", "spiece.model"),
}


def resolve_network_folder(folder: Any, part: str, name: str) -> Path:
    """The folder of a saved network: that of a run, in which it is `part`, or its own; checked to hold no code.

    Raises:
        FileNotFoundError: naming `name`, if there is none.
        ValueError: for code in the folder.
    """
    given = expand_user(folder, name)
    for place in (given / part, given):
        if (place / "config.json").is_file():
            check_no_code(place)
            return place
    raise FileNotFoundError(f"{name} must be a run's folder with {part}/, or a saved network, got {str(given)!r}")


def check_component(folder: Path, kind: type, variant: str | None = None) -> Mapping[str, Any]:
    """Compare a component's weight file with the network that its config describes, by header only.

    Args:
        variant: part of the weight file's name, such as "fp16", as diffusers has it.

    Returns:
        The configuration, with the defaults of what the file leaves out.

    Raises:
        ValueError: naming the file and the first tensors that are wrong.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    return check_described(kind, config, folder, variant)


def check_t5(folder: Path) -> Mapping[str, Any]:
    """Check a text encoder of transformers, which names tensors anew as it loads: no tensor by its name.

    Returns:
        Its configuration.

    Raises:
        ValueError: no config, or one of another kind or size than the weights; weights missing, damaged or not of floats.
    """
    file = folder / "config.json"
    config = read_object(file)
    check_no_code_keys(config, file)
    if config.get("model_type") != "t5":
        raise ValueError(f"{file} has model_type: {config.get('model_type')!r}, expected 't5'")
    adapter = folder / "adapter_config.json"
    if adapter.exists():  # transformers would take the weights from the model that it names, over the network
        raise ValueError(f"{adapter} makes this the adapter of another model; merge it into the encoder's weights")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{folder / 'model.safetensors'} is missing; {_AGAIN}")
    found = {name: stored for weight in weights for name, stored in read_header(weight).items()}
    check_layer_counts(found, config, {"num_layers": ("encoder.block.",)}, file)
    if not config.get("quantization_config"):  # which has its own reader, and types of its own
        check_dtypes(found, str(folder))
    return config


def check_tokenizer(folder: Path, kind: str) -> None:
    """Check a tokenizer of transformers, which reads a folder without one as that of another library and asks for that.

    Args:
        kind: name of its class.

    Raises:
        ValueError: a file is missing or damaged.
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
        read_object(file)  # says it more clearly where it is not even JSON
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # of its own kind, which is none of Python's
            raise ValueError(f"{file} is damaged or not a tokenizer: {error}; download or convert it again") from error
