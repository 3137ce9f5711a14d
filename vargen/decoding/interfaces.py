"""What decoding asks of a model, a drafter, an acceptance rule and a trained draft head; and of a next-scale model.

A subclass defines the members without a default. The others describe optional abilities, which by default are absent.

Shape suffixes: B images, R rows of the network (B, times two with CFG), T tokens fed in one pass, N tokens of the grid, D
feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling, SlotSampling
from vargen.decoding.tree import Draft, Output, PassResult, Tree, Verdict
from vargen.values import validate_fields

if TYPE_CHECKING:
    from vargen.decoding.token_pass import TokenState
    from vargen.decoding.window import WidthController


class TokenModel:
    """Base class of next-token models. CFG rows, caches and conditions are internal to the model.

    Attributes:
        vocab: number V of image tokens, which are 0 to V - 1.
        grid: rows and columns of the token grid, which is generated in raster order.
        device: where passes run.
        codebook: float `[V, C]`, embedding vectors that define the similarity of tokens.
        draft_model: a smaller model with the same tokens.
        draft_heads: draft heads trained on the model's features, by name, such as `"eagle"`.
        low_res: a low-resolution model from which draft tokens can be sampled.
        forced: int64 `[N]`, the only possible token of positions such as the end of a row, as in the logits; -1 elsewhere.
        num_layers: number of layers that `skip_layers` can skip.
        networks: those that passes read. Captured passes are captured again if their weights are elsewhere.
        cost_key: identifies what the cost of a pass depends on besides batch size and machine: model sizes, dtype, guidance,
            compilation. None disables caching of measured costs.
    """

    vocab: int
    grid: tuple[int, int]
    device: torch.device
    codebook: Tensor | None = None
    draft_model: TokenModel | None = None
    draft_heads: Mapping[str, DraftHead] = MappingProxyType({})
    low_res: LowResModel | None = None
    forced: Tensor | None = None
    num_layers: int = 0
    networks: Sequence[nn.Module] = ()
    cost_key: Hashable = None

    def bind(self, slots: int) -> TokenModel:
        """Return a copy for an engine with B slots, which holds what differs by slot, such as the guidance scale."""
        return self

    def has_room(self, condition: Any, state: Any) -> bool:
        """Whether a state that was allocated for another condition has room for this one."""
        return True

    def allocate(self, condition: Any, width: int, slots: int | None = None) -> Any:
        """Allocate the state of `slots` images, with room for conditions as long as this one; see `prefill`.

        Args:
            condition: one row for each image.
            width: maximum number T of tokens fed in one pass.
            slots: number of images B. None: one for each row of the condition.
        """
        raise NotImplementedError

    def prefill(self, condition: Any, state: Any, rows: Tensor | None = None) -> Output:
        """Start n images in slots of a state, whatever was there before, such as the NaN of an image that failed.

        Args:
            condition: n rows.
            rows: int64 `[n]`, the slots. None: all.

        Returns:
            The output with one position, which predicts token 0: logits `[n, 1, V]`.

        Raises:
            ValueError: if the condition is longer than the state has room for. Nothing is changed then.
        """
        raise NotImplementedError

    def start(self, condition: Any, width: int) -> tuple[Any, Output]:
        """Allocate the state of as many images as the condition has rows, and start them."""
        state = self.allocate(condition, width)
        return state, self.prefill(condition, state)

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` after those already in the cache of each row.

        The output at each slot predicts the token that follows it.
        """
        raise NotImplementedError

    def narrow(self, state: Any, length: int) -> Any:
        """Return what `forward` needs of the state if each image has at least `length` tokens, all but the last in the state.

        All other methods take the whole state. The result is the same object in each pass that needs the same.
        """
        return state

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        """Keep the first `count` slots of `path` from the last pass (see `Verdict`) and discard the others."""
        raise NotImplementedError

    def rollback(self, state: Any, length: Tensor) -> None:
        """Truncate the state of each row to its first `length` `[B]` tokens."""
        raise NotImplementedError

    def skip_layers(self, layers: Sequence[int]) -> TokenModel:
        """Return a view of the model without these layers, numbered from 0. It has its own states and shares the weights.

        Raises:
            ValueError: if a layer does not exist, or the model cannot skip layers in its current state; says why.
        """
        raise ValueError("layers cannot be skipped: this model has no layers to skip")


class LowResModel:
    """Base class of models that generate an image at low resolution, and from it token probabilities of the target model.

    Attributes:
        vocab, grid: those of the target.
        networks: those that `probs` reads; see `TokenModel`.
    """

    vocab: int
    grid: tuple[int, int]
    networks: Sequence[nn.Module] = ()

    def start(self, condition: Any, seeds: Tensor, sampling: Sampling) -> Tensor:
        """Generate n images at low resolution. Returns what `probs` needs of each, `[n, ...]`."""
        raise NotImplementedError

    def probs(self, images: Tensor, tokens: Tensor, length: Tensor, position: Tensor, sampling: SlotSampling) -> Tensor:
        """Probabilities float32 `[B, S, V]` of the target's tokens at positions `[B, S]`, from which draft tokens are sampled.

        They may depend only on the first `length` `[B]` of tokens `[B, N]`, whether committed or drafted, and on noise that is
        used for nothing else (`derive_seeds`).

        Args:
            images: `[B, ...]`, rows that `start` returned.
        """
        raise NotImplementedError


class Part:
    """Base class of the parts of a method: data, of which `bind` makes copies that also have what the model determines."""

    def __post_init__(self) -> None:
        validate_fields(self)

    def copy(self, **buffers: Any) -> Self:
        """Return a copy with further attributes."""
        made = copy(self)
        made.keep(**buffers)
        return made

    def keep(self, **buffers: Any) -> None:
        """Set attributes of a bound copy, which is data of one engine."""
        vars(self).update(buffers)


class Drafter(Part):
    """Proposes draft tokens. A subclass is data, such as a frozen dataclass; `bind` returns a copy that also has buffers.

    Attributes:
        topology: shape of its drafts: `"chain"` or `"tree"`.
        provides: properties of its sampling that rules may require. `"independent-per-pass"`: every draft token is sampled
            again in every pass, with uniforms that no other draft token of this or any other pass depends on.
            `"with-replacement"`: siblings are sampled independently of each other, and their number does not depend on the
            samples.
        uses_probs: whether it needs the target's probabilities, if the rule does not (`AcceptanceRule.verify_tokens`).
        width: maximum number T of tokens fed in one pass, root included.
    """

    topology: str = "chain"
    provides: tuple[str, ...] = ()
    uses_probs: bool = True

    @property
    def width(self) -> int:
        raise NotImplementedError

    def bind(self, model: TokenModel, slots: int) -> Self:
        """Return a copy for a model, with its own buffers for B slots: the drafter itself is shared by engines and threads.

        Sizes of drafts are limited to the grid and the vocabulary.

        Raises:
            ValueError: if it cannot draft for this model; says why.
        """
        return self.copy()

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        """Start n images in slots int64 `[n]`, whatever was there before; `first` is the output of their prefill."""

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        """Return the draft of a pass, at most `width - 1` tokens on a path. The last committed token is the root.

        Args:
            noise: noise of the pass; its position `[B, 1]` is that of the token after the root. The drafter takes all random
                numbers from it, for later positions through `Noise.shift`.
        """
        raise NotImplementedError

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Learn the result of a pass, before the lengths of the state increase."""

    def choose_widths(self, model: TokenModel, condition: Any, slots: int) -> WidthController | None:
        """Return what selects the number of tokens of each pass; None: `width` in every pass."""
        return None


VerifyTokens = Callable[[Tensor, Draft], Verdict]


class AcceptanceRule(Part):
    """Base class of rules: pure functions of the target distribution after each fed slot, the draft, the noise, and the
    relaxation spent so far.

    Attributes:
        exact: whether the output is distributed as the target.
        topologies: which drafts it can verify, of `"chain"` and `"tree"`.
        requires: what it requires of the drafter's sampling; see `Drafter.provides`.
        sequential_tokens: whether it commits the tokens that sequential decoding selects with the same noise.
        leaves_first: whether it tests the children of a slot before the slot itself. If so, it compares
            `noise.fold_in(slots).uniform(Purpose.ACCEPT)` at slot s with the acceptance probability of s. Otherwise it compares
            `noise.fold_in(k).uniform(Purpose.ACCEPT)` at slot s with that of the k-th child of s. The exactness check relies on
            this.
        verify_tokens: the rule as a function of the draft and of the tokens int64 `[B, T]` that `noise.sample(probs,
            Purpose.TOKEN)` returns; None if it needs more of the probabilities than these.
    """

    exact: bool
    topologies: tuple[str, ...] = ("chain",)
    requires: tuple[str, ...] = ()
    sequential_tokens: bool = False
    leaves_first: bool = False
    verify_tokens: VerifyTokens | None = None

    def bind(self, model: TokenModel) -> Self:
        """Return the rule for a model, with whatever it needs from it, such as the codebook.

        Raises:
            ValueError: if the model lacks what the rule needs.
        """
        return self

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """Verify a draft.

        Args:
            probs: float32 `[B, T, V]`; row t is the target distribution after fed slot t.
            draft: T - 1 tokens per image.
            noise: its positions `[B, T]` are those of the token after each slot.
            relaxation: float32 `[B]`, relaxation that the image spent in earlier passes. Ignored by exact rules.
        """
        raise NotImplementedError


class DraftHead:
    """Base class of draft heads, which are trained on a target's features.

    Attributes:
        vocab, grid: those of the target.
        networks: those that it reads; see `TokenModel`.
    """

    vocab: int
    grid: tuple[int, int]
    networks: Sequence[nn.Module] = ()


def require_same_tokens(part: str, found: TokenModel | LowResModel | DraftHead, model: TokenModel) -> None:
    """Raise ValueError unless a part, which drafts for a target, has its vocabulary and grid."""
    if (found.vocab, found.grid) != (model.vocab, model.grid):
        raise ValueError(
            f"{part} must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
            f"got {found.vocab} on {found.grid}"
        )


class AutoregressiveHead(DraftHead):
    """A draft head that extrapolates the target's features one token at a time (EAGLE).

    Slot j takes a token and the feature that predicted it, and outputs what predicts the next token. The input features are the
    target's own for tokens that the target has processed, and the head's outputs after that. CFG rows and caches are internal
    to the head, as are the target's final norm and output layer, which produce the logits.
    """

    def allocate(self, slots: int, width: int) -> Any:
        """Allocate the empty state of B images. At most `width` slots are fed between two commits."""
        raise NotImplementedError

    def reset(self, state: Any, rows: Tensor) -> None:
        """Empty the state of images int64 `[n]`, whatever was there before."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, features: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` with features `[R, T, D]`.

        They are the last T slots of `tree`; the earlier slots were fed by previous calls since the last commit. Returns logits
        `[B, T, V]` after guidance and features `[R, T, D]`, which predict the token after each slot.
        """
        raise NotImplementedError

    def commit(self, state: Any, count: Tensor) -> None:
        """Keep the first `count` `[B]` of the slots fed since the last commit and discard the others."""
        raise NotImplementedError


class ParallelHeads(DraftHead):
    """Draft heads that predict several tokens ahead from one feature of the target (Medusa).

    Attributes:
        num_heads: number h of tokens predicted ahead.
    """

    num_heads: int

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        """Logits `[B, h, V]` after guidance for the h tokens that follow tokens `[B]` at positions `[B]`.

        The target sampled these tokens from its features `[R, 1, D]`. The h predictions are independent of each other.
        """
        raise NotImplementedError


class ScaleModel:
    """Base class of next-scale models: the tokens of a scale are independent given the coarser scales, and take one pass.

    Scales, and models with the same image tokenizer, exchange only the *canvas*: the accumulated contributions of the scales so
    far. CFG rows, caches and conditions are internal to the model.

    Attributes:
        vocab: number V of tokens in the shared codebook.
        scale_tokens: number of tokens of every scale, coarse to fine.
        scale_codes: number of tokens that each scale may use, which are the first ones of the V.
        draft_model: a smaller model with the same image tokenizer; None if there is none.
        cost_key, networks: as in `TokenModel`.
    """

    vocab: int
    scale_tokens: tuple[int, ...]
    scale_codes: tuple[int, ...]
    device: torch.device
    draft_model: ScaleModel | None = None
    networks: Sequence[nn.Module] = ()
    cost_key: Hashable = None

    def allocate(self, condition: Any, slots: int, is_guided: bool = True) -> Any:
        """Allocate the state of B images, with room for conditions as long as this one.

        Args:
            is_guided: whether any pass will be guided; otherwise there are no unconditional rows.
        """
        raise NotImplementedError

    def reset(self, state: Any, condition: Any) -> None:
        """Start B images, whatever was there before: no scale is in the cache. Runs no pass."""
        raise NotImplementedError

    def canvas(self, batch: int) -> Tensor:
        """Return the canvas before the first scale."""
        raise NotImplementedError

    def add(self, canvas: Tensor, tokens: Tensor, scale: int) -> tuple[Tensor, Tensor | None]:
        """Add the tokens int64 `[B, n]` of a scale to the canvas. Does not modify its arguments.

        Returns:
            The new canvas, and the transformer input at the next scale, `[B, n', E]`; None after the last scale.
        """
        raise NotImplementedError

    def forward(self, state: Any, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        """Run one block-causal pass over the scales that are not in the cache yet, up to the last of `inputs`, and cache them.

        Args:
            inputs: what `add` returned, by scale; None for scale 0.
            guidance: a factor on the requested guidance of the last scale; 0 skips the unconditional rows.

        Returns:
            Guided logits of the last scale, `[B, n, codes]`.
        """
        raise NotImplementedError

    def set_cached(self, state: Any, scales: int) -> None:
        """Continue with the first `scales` scales in the cache: later ones are discarded, those of captured passes count."""
        raise NotImplementedError
