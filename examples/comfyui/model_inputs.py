"""The inputs that both nodes have, their validation, and the opened models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vargen import open_pipeline
from vargen.decoding import list_methods
from vargen.pipelines.loading import find_pipeline_class, inspect_model

MODEL_DEFAULT = "default"
_MAX_SEED = 2**53 - 1  # the largest that ComfyUI's page stores exactly


def describe_inputs(model: str, prompt: str, paradigms: Sequence[str]) -> dict[str, Any]:
    """Return model, prompt, seed and method as `INPUT_TYPES` declares them."""
    methods = [each.name for paradigm in paradigms for each in list_methods(paradigm) if not each.experimental]
    return {
        "model": ("STRING", {"default": model, "tooltip": "A packaged model, a folder, or owner/name on the hub."}),
        "prompt": ("STRING", {"default": prompt, "multiline": True}),
        "seed": ("INT", {"default": 0, "min": 0, "max": _MAX_SEED}),
        "method": ([MODEL_DEFAULT, *methods], {"default": MODEL_DEFAULT, "tooltip": "default: the model's."}),
    }


def check_model(model: str | None, method: str | None, paradigms: Sequence[str]) -> bool | str:
    """Return True, or one sentence that says why the model cannot run here; for `VALIDATE_INPUTS`. Reads no weights.

    Args:
        model, method: None for values that another node computes.
    """
    if model is None:
        return True
    try:
        _require_paradigm(model, paradigms)
        pipe = inspect_model(model)
        if method not in (None, MODEL_DEFAULT):
            pipe.validate_method(pipe.resolve_method(method))
    except (ValueError, TypeError, OSError) as error:
        return str(error)
    return True


@lru_cache(maxsize=2)
def open_model(model: str, paradigms: tuple[str, ...]) -> Any:
    """Open a model on the GPU if there is one. The last two stay open.

    Raises:
        ValueError: for a model that cannot be opened, or of another paradigm.
    """
    _require_paradigm(model, paradigms)
    pipe = open_pipeline(model, device="auto")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _require_paradigm(model: str, paradigms: Sequence[str]) -> None:
    if (paradigm := find_pipeline_class(model).paradigm) not in paradigms:
        raise ValueError(f"model must be a {' or '.join(paradigms)} model in this node, and {model!r} is a {paradigm} model")
