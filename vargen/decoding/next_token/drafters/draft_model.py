"""Speculative drafting: a smaller model with the same vocabulary samples a chain, which the target verifies.

Leviathan et al. 2023; Chen et al. 2023. The draft model has its own cache, which is rolled back by moving its length pointer.

Shape suffixes: B images, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.draft_length import GeometricEstimate, WidthController
from vargen.decoding.next_token.protocols import LayeredModel, TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.pass_costs import measure_pass_costs
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import parse_float, parse_int, short_repr

_LONGEST = 8  # maximum number of draft tokens of an automatic chain


def _drafting(small: dict[int, float], drafts: int) -> float:
    """Return the seconds the draft model spends on a chain.

    It runs one pass over two tokens (see `propose`), then one per further draft token.
    """
    return small[2] + (drafts - 1) * small[1] if drafts else 0.0


@dataclass
class _State:
    model: TokenModel
    held: Any
    sampling: Sampling
    seeds: Tensor
    total: int
    length: int
    choice: WidthController | None


@dataclass(frozen=True)
class Speculative:
    """Draft a chain with a smaller model.

    Args:
        length: draft tokens per pass, at least 1; each takes one pass of the draft model. `"auto"` selects up to 8, maximizing
            tokens per second according to measured pass costs of both models and recent acceptance; where drafting does not pay
            off, it stops. This depends on timing and on the batch, like the window `Auto`: the distribution is unchanged, but
            an image is reproducible only with the rule `shared_noise`. On a GPU the length is fixed before the first pass.
        model: the draft model. None: `draft_model` of the target, set by pipelines with a `draft_transformer`.
        shared_noise: sample draft tokens with the shared noise, which couples them to those of the target; for the rule
            `shared_noise`. By default draft tokens have their own uniforms.

    Raises:
        ValueError: if the length is below 1. `bind` raises it if the chain does not fit the grid, or the draft model is missing
            or has another vocabulary or grid.
    """

    length: int | Literal["auto"] = 4
    model: TokenModel | None = None
    shared_noise: bool = False
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, TokenModel)):
            given = short_repr(self.model)
            raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), or None, got {given}")
        if not isinstance(self.shared_noise, bool):
            raise TypeError(f"shared_noise must be True or False, got {short_repr(self.shared_noise)}")
        if isinstance(self.length, str) and self.length == "auto":
            return
        length = parse_int(self.length, 1)
        if length is None:
            given = short_repr(self.length)
            raise ValueError(
                f"length, the drafted tokens of a pass, must be a whole number of at least 1, or 'auto', got {given}"
            )
        object.__setattr__(self, "length", length)

    @property
    def longest(self) -> int:
        return _LONGEST if isinstance(self.length, str) else self.length

    @property
    def max_fed(self) -> int:
        return self.longest + 1

    @property
    def offers(self) -> tuple[str, ...]:
        """See `OfferingDrafter`."""
        return () if self.shared_noise else ("fresh",)

    def small_model(self, model: TokenModel) -> TokenModel:
        """Return the draft model for `model`.

        Raises:
            ValueError: if there is none, or its vocabulary or grid differs.
        """
        small = self.model or model.draft_model
        if small is None:
            raise ValueError(
                "speculative decoding needs a draft model, and this pipeline has none: load one with a draft_transformer, "
                "or pass Accelerator(drafter=Speculative(model=...))"
            )
        if (small.vocab, small.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the draft model must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {small.vocab} on {small.grid}"
            )
        return small

    def bind(self, model: TokenModel) -> Speculative:
        """Return this drafter.

        Raises:
            ValueError: if there is no matching draft model, or the chain does not fit after the first token of the grid.
        """
        self.small_model(model)
        self.check_grid(model.grid[0] * model.grid[1])
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the chain fits after the first token of a grid of `tokens` tokens."""
        if not isinstance(self.length, str) and self.length >= tokens:
            given = short_repr(self.length)
            raise ValueError(f"length must be from 1 to {tokens - 1}, one less than the grid's tokens, got {given}")

    def fitted(self, tokens: int) -> Speculative:
        """Return the drafter with a chain that fits after the first token of a grid of `tokens` tokens."""
        return replace(self, length=tokens - 1) if not isinstance(self.length, str) and self.length >= tokens else self

    def resized(self, window: int | str) -> Speculative:
        """Set the length to `"auto"` if `window` is; numbers apply to windows and leave a chain unchanged."""
        return replace(self, length="auto") if window == "auto" else self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        small, choice, length = self.small_model(model), None, self.longest
        if isinstance(self.length, str):
            images = len(seeds)
            costs = measure_pass_costs(model, condition, images, range(1, _LONGEST + 2))
            drafting = measure_pass_costs(small, condition, images, [1, 2])
            steps = {fed: seconds + _drafting(drafting, fed - 1) for fed, seconds in costs.items()}
            choice = WidthController(steps, GeometricEstimate())
            length = choice.next() - 1
        held, _ = small.prefill(condition, max(2, self.longest))
        return _State(small, held, sampling, seeds, model.grid[0] * model.grid[1], length, choice)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds of the draft model's passes for a chain of `drafts` tokens."""
        return _drafting(measure_pass_costs(self.small_model(model), condition, images, [1, 2]), drafts)

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        """Feed the last two committed tokens, then every draft token except the last.

        Two, because the draft model has not processed the last draft token of a fully accepted chain.
        """
        model, held, device = state.model, state.held, tokens.device
        if state.length == 0:
            return Draft.empty(len(tokens), model.vocab, device)
        start = (length - 2).clamp(min=0)
        model.rollback(held, start)
        pair = tokens.gather(1, start[:, None] + torch.arange(2, device=device))
        root = (length - 1 - start)[:, None]  # slot of the root: 0 when only one token is committed
        two, one = Tree.of_chain(1, device), Tree.of_chain(0, device)
        logits = model.forward(pair, held, two).logits
        logits = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[-1]))
        model.commit(held, torch.arange(2, device=device).expand(len(tokens), 2), root[:, 0] + 1, two)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        position = length[:, None]
        for drafts in range(state.length):
            if drafts:
                logits = model.forward(drafted[-1], held, one).logits
                model.commit(held, torch.zeros_like(length)[:, None], torch.ones_like(length), one)
            probs.append(to_probs(logits, state.sampling))
            drafted.append(Noise(state.seeds, position + drafts, step).draw(probs[-1], purpose))
        slots = torch.arange(state.length, device=device)
        valid = length[:, None] + slots < state.total
        return Draft(torch.cat(drafted, 1), Tree.of_chain(state.length, device), torch.cat(probs, 1), valid)

    def observe(self, state: _State, step: Step) -> None:
        """Update the controller.

        Draft tokens need no handling: the next proposal rolls the cache back to the committed tokens.
        """
        if state.choice and step.count.device.type == "cpu":
            state.choice.observe(step.verdict.count, step.noise.position[:, 0] < state.total)
            state.length = state.choice.next() - 1


@dataclass(frozen=True)
class LayerSkip(Speculative):
    """Draft a chain with the target itself, skipping some of its layers (Zhang et al. 2023, Draft & Verify).

    The reduced network is a draft model that needs no training and no memory for weights; it has its own cache.

    Args:
        length, shared_noise: see `Speculative`.
        skip: fraction of layers to skip, between 0 and 1 exclusive, spread evenly while keeping the first two and the last,
            which matter most. Alternatively explicit layer indices from 0, `(3, 5, 6)` or `"3+5+6"`; `best_layers` finds them
            for a model.

    Raises:
        ValueError: if the fraction or the indices are invalid. `bind` raises it if the model cannot skip layers, or lacks
            these.
    """

    model: TokenModel | None = field(default=None, init=False, repr=False)
    skip: float | str | tuple[int, ...] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        share = parse_float(self.skip)
        if share is None:
            parts = self.skip.split("+") if isinstance(self.skip, str) else self.skip
            found = [_layer(part) for part in parts] if isinstance(parts, list | tuple) else []
            if not found or None in found or len(set(found)) < len(found):
                given = short_repr(self.skip)
                raise ValueError(f"skip must be a share of the layers, or layers, each once, as in '3+5+6', got {given}")
            object.__setattr__(self, "skip", tuple(found))
            return
        if not 0 < share < 1:
            raise ValueError(
                f"skip, the share of the layers left out, must be above 0 and below 1, got {short_repr(self.skip)}"
            )
        object.__setattr__(self, "skip", share)

    def layers(self, count: int) -> tuple[int, ...]:
        """Return the indices of the skipped layers out of `count`."""
        if isinstance(self.skip, tuple):
            return self.skip
        assert isinstance(self.skip, float)
        first, last = min(2, count - 2), count - 2
        left_out = max(1, min(round(self.skip * count), last - first + 1))
        return tuple(torch.linspace(last, first, left_out).round().int().sort().values.tolist())

    def small_model(self, model: TokenModel) -> TokenModel:
        """Return the target without the skipped layers.

        Raises:
            ValueError: if it cannot skip layers, or lacks these.
        """
        if not isinstance(model, LayeredModel) or model.layers < 3:
            raise ValueError("skipping layers needs a model that can, and has at least three of them")
        return model.skipping(self.layers(model.layers))


def _layer(given: Any) -> int | None:
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 9 else parse_int(given, 0)


def best_layers(
    model: LayeredModel, condition: Any, tokens: Tensor, sampling: Sampling, most: int
) -> list[tuple[tuple[int, ...], float]]:
    """Search for the layers to skip, greedily: add the layer whose removal keeps acceptance highest.

    SWIFT (Xia et al. 2024) searches for layers whose drafts match the generated tokens. Here the objective is the mean
    acceptance rate, the sum of min(p, q), over the positions of images that the model generated. The search takes at most n (n
    - 1) / 2 passes over whole images for n layers.

    Args:
        condition: of the images, B rows.
        tokens: int64 `[B, N]`.
        most: largest number of layers to skip.

    Returns:
        For each number of layers from 1, their sorted indices and the acceptance rate.
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
