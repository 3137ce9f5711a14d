"""Layer skipping: the target drafts for itself, by passes that leave some of its layers out.

Shape suffixes: B images, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.draft import Tree
from vargen.decoding.drafters.small_model import Speculative
from vargen.decoding.protocols import LayeredModel, TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import real, shown, whole


@dataclass(frozen=True)
class LayerSkip(Speculative):
    """Drafts from the target itself, some of whose layers are skipped (Zhang et al. 2023, Draft & Verify).

    The network with fewer layers is a small model that needs neither training nor memory for weights; its cache is its own.

    Args:
        length, shared_noise: see `Speculative`.
        skip: the share of the layers that is left out, above 0 and below 1: as many, evenly spread between the first two and
            the last, which matter most. Or which, as numbers from 0, `(3, 5, 6)` or `"3+5+6"`; `best_layers` finds a model's.

    Raises:
        ValueError: for a share or numbers that are none; by `bind` if the model cannot skip layers, or has not these.
    """

    model: TokenModel | None = field(default=None, init=False, repr=False)
    skip: float | str | tuple[int, ...] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        share = real(self.skip)
        if share is None:
            parts = self.skip.split("+") if isinstance(self.skip, str) else self.skip
            found = [_layer(part) for part in parts] if isinstance(parts, list | tuple) else []
            if not found or None in found or len(set(found)) < len(found):
                given = shown(self.skip)
                raise ValueError(f"skip must be a share of the layers, or layers, each once, as in '3+5+6', got {given}")
            object.__setattr__(self, "skip", tuple(found))
            return
        if not 0 < share < 1:
            raise ValueError(f"skip, the share of the layers left out, must be above 0 and below 1, got {shown(self.skip)}")
        object.__setattr__(self, "skip", share)

    def layers(self, count: int) -> tuple[int, ...]:
        """Those of `count` that are skipped."""
        if isinstance(self.skip, tuple):
            return self.skip
        assert isinstance(self.skip, float)
        first, last = min(2, count - 2), count - 2
        left_out = max(1, min(round(self.skip * count), last - first + 1))
        return tuple(torch.linspace(last, first, left_out).round().int().sort().values.tolist())

    def small_model(self, model: TokenModel) -> TokenModel:
        """The target without the skipped layers.

        Raises:
            ValueError: if it cannot skip layers, or has not these.
        """
        if not isinstance(model, LayeredModel) or model.layers < 3:
            raise ValueError("skipping layers needs a model that can, and has at least three of them")
        return model.skipping(self.layers(model.layers))


def _layer(given: Any) -> int | None:
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 9 else whole(given, 0)


def best_layers(
    model: LayeredModel, condition: Any, tokens: Tensor, sampling: Sampling, most: int
) -> list[tuple[tuple[int, ...], float]]:
    """Which layers to skip: one at a time, the one without which drafts are accepted most often.

    SWIFT (Xia et al. 2024) searches for the layers whose drafts match what is drawn; here what counts is the mean acceptance,
    the sum of min(p, q), over the positions of pictures that the model has drawn. Sets are found greedily: n (n - 1) / 2 passes
    over whole pictures at most for n layers.

    Args:
        condition: of the pictures, B rows.
        tokens: int64 `[B, N]`.
        most: sets of 1 to so many layers are found.

    Returns:
        Of each size the layers, in order, and their acceptance.
    """

    def probs(each: Any) -> Tensor:
        state, _ = each.prefill(condition, tokens.shape[1])
        return to_probs(each.forward(tokens, state, Tree.of_chain(tokens.shape[1] - 1, tokens.device)).logits, sampling)

    target = probs(model)
    found: list[tuple[tuple[int, ...], float]] = []
    skipped: tuple[int, ...] = ()
    for _ in range(min(most, model.layers - 1)):
        accepted = {
            layer: float(torch.minimum(target, probs(model.skipping((*skipped, layer)))).sum(-1).mean())
            for layer in range(model.layers)
            if layer not in skipped
        }
        best = max(accepted, key=lambda layer: accepted[layer])
        skipped = tuple(sorted((*skipped, best)))
        found.append((skipped, accepted[best]))
    return found
