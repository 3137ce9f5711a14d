"""Parts that a packaged model takes from another packaged one, so that both need not carry the same text encoder.

`borrowed.json` in the folder says where each lies: `{"text_encoder": "emoji", "tokenizer": "emoji", "prompt_names": "emoji"}`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vargen.assets import packaged_model_path, packaged_models
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.values import short_repr

FILE = "borrowed.json"
PARTS = ("text_encoder", "tokenizer", "prompt_names")


def shared_component_folders(folder: Path) -> dict[str, Path]:
    """For each part that a model folder borrows, the folder of the packaged model that has it.

    Raises:
        ValueError: if the file is damaged, or names what is no such part or no packaged model.
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
    """The components that a model folder borrows and a caller does not bring, loaded."""
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
