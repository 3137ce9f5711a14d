"""Image and video reward models behind one interface, by name as on the command line.

Names are `emoji-scorer`, `clip:model=ViT-L-14,weights=FILE`, `module:function`.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from vargen.scoring.protocol import BatchedScorer, FunctionScorer, NonFiniteScoreError, Scorer, score_images, to_scorer
from vargen.specs import import_object, parse_spec
from vargen.values import short_repr

__all__ = [
    "SCORERS",
    "BatchedScorer",
    "FunctionScorer",
    "NonFiniteScoreError",
    "Scorer",
    "default_scorer",
    "open_scorer",
    "score_images",
    "to_scorer",
]

DEFAULT_SCORER = "emoji-scorer"
# Classes and options by name; any other name is that of a packaged scorer or a scorer's folder.
SCORERS = {
    "clip": ("vargen.scoring.clip:CLIPScorer", ("model", "weights", "prefix")),
    "image-reward": ("vargen.scoring.reward_models:ImageRewardScorer", ("weights", "tokenizer")),
    "pick-score": ("vargen.scoring.reward_models:PickScoreScorer", ("weights", "tokenizer")),
}


def default_scorer(model: str) -> str | None:
    """Return the packaged scorer of a packaged model: `emoji-scorer` for `emoji-var`."""
    from vargen.scoring.image_text import packaged_scorers

    name = f"{model.split('-')[0]}-scorer"
    return name if name in packaged_scorers() else None


def open_scorer(spec: str, device: torch.device | str = "cpu", batch_size: int | None = None) -> Scorer:
    """Open the scorer that `spec` names; see the docstring of the package for the forms."""
    where, colon, _ = spec.partition(":")
    if colon and "=" not in spec and where not in SCORERS:
        return _import_scorer(spec)
    name, options = parse_spec(spec)
    where, allowed = SCORERS.get(name, ("vargen.scoring.image_text:ImageTextScorer", ("text_encoder",)))
    if unknown := [key for key in options if key not in allowed]:
        raise ValueError(f"scorer {name} has no option {short_repr(unknown[0])}; it takes {', '.join(allowed)}")
    common: dict[str, Any] = {"device": device, **({} if batch_size is None else {"batch_size": batch_size})}
    source = {} if name in SCORERS else {"source": name}
    module, _, kind = where.partition(":")
    return getattr(importlib.import_module(module), kind)(**source, **options, **common)


def _import_scorer(spec: str) -> Scorer:
    """Import a scorer, a class of scorers, or a function of images and prompts; nothing else is called."""
    value = import_object(spec, "scorer")
    if inspect.isclass(value) and callable(getattr(value, "score", None)):
        value = value()
    try:
        if not isinstance(value, Scorer):
            inspect.signature(value).bind((), ())
        return to_scorer(value, spec.partition(":")[2])
    except (TypeError, ValueError):  # not a function, other parameters, or no readable signature
        expected = "a scorer, a class with a method score(images, prompts), or a function of images and prompts"
        raise ValueError(f"scorer {short_repr(spec)} must be {expected}, got {short_repr(value)}") from None
