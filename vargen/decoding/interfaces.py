"""Base classes of next-token decoding: the model, the drafter, the acceptance rule, and trained draft heads.

A subclass defines the members without a default. The others describe optional abilities, which by default are absent.

Shape suffixes: B images, R rows of the network (B, times two with CFG), T tokens fed in one pass, N tokens of the grid, D
feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.rows import insert_rows
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output, Step, Tree, Verdict


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
        example_tokens: integers `[M, N]`, tokens of M images, such as training images. The same tensor object is returned as
            long as its contents are unchanged.
        forced: int64 `[N]`, the only possible token of positions such as the end of a row, as in the logits; -1 elsewhere.
        num_layers: number of layers that `skip_layers` can skip.
        capture_blocker: why a CUDA graph cannot capture a pass of this model; None if it can.
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
    example_tokens: Tensor | None = None
    forced: Tensor | None = None
    num_layers: int = 0
    capture_blocker: str | None = None
    cost_key: Hashable = None

    def prefill(self, condition: Any, max_width: int) -> tuple[Any, Output]:
        """Start B images.

        Returns the state, and an output with one position, which predicts token 0. Later passes feed at most `max_width`
        tokens.
        """
        raise NotImplementedError

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` after those already in the cache of each row.

        The output at each slot predicts the token that follows it.
        """
        raise NotImplementedError

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        """Keep the first `count` slots of `path` from the last pass (see `Verdict`) and discard the others."""
        raise NotImplementedError

    def rollback(self, state: Any, length: Tensor) -> None:
        """Truncate the state of each row to its first `length` `[B]` tokens."""
        raise NotImplementedError

    def join(self, state: Any, new: Any, rows: Tensor) -> Any:
        """Return the state of a running batch with the images of `new`, a state after prefill, in rows int64 `[n]`."""
        return insert_rows(state, new, rows)

    def skip_layers(self, layers: Sequence[int]) -> TokenModel:
        """Return a view of the model without these layers, numbered from 0. It has its own states and shares the weights.

        Raises:
            ValueError: if a layer does not exist, or the model cannot skip layers in its current state; says why.
        """
        raise ValueError("layers cannot be skipped: this model has no layers to skip")


class LowResModel(Protocol):
    """Generates an image at low resolution and derives from it the token probabilities of the target model.

    Attributes:
        vocab, grid: those of the target.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    def start(self, condition: Any, seeds: Tensor, sampling: Sampling) -> Any:
        """Return the state of B images: their low-resolution images."""

    def join(self, state: Any, new: Any, rows: Tensor) -> Any:
        """Return the state of a running batch with the images of `new`, which `start` returned, in rows int64 `[n]`."""

    def probs(self, state: Any, tokens: Tensor, length: Tensor, position: Tensor) -> Tensor:
        """Probabilities float32 `[B, S, V]` of the target's tokens at positions `[B, S]`, from which draft tokens are sampled.

        They may depend only on the first `length` `[B]` of tokens `[B, M]`, whether committed or drafted, and on noise that is
        used for nothing else (`derived`).
        """


class Drafter:
    """Base class of drafters, which propose draft tokens.

    A drafter keeps no state of its own between images; all state lives in the object that `start` returns.

    Attributes:
        topology: shape of its drafts: `"chain"` or `"tree"`.
    """

    topology: str = "chain"

    @property
    def max_width(self) -> int:
        """Maximum number T of tokens fed in one pass, root included."""
        raise NotImplementedError

    @property
    def provides(self) -> tuple[str, ...]:
        """Properties of its sampling that rules may require.

        `"independent-per-pass"`: every draft token is sampled again in every pass, with uniforms that no other draft token of
        this or any other pass depends on. `"with-replacement"`: siblings are sampled independently of each other, and their
        number does not depend on the samples.
        """
        return ()

    @property
    def uses_probs(self) -> bool:
        """Whether it needs the target's probabilities, if the rule does not (`AcceptanceRule.verify_tokens`)."""
        return True

    @property
    def join_blocker(self) -> str | None:
        """Why images cannot join a running batch (`vargen.decoding.next_token.engine`); None if they can."""
        return None

    def bind(self, model: TokenModel) -> Self:
        """Return the drafter for a model; called before anything is allocated.

        Raises:
            ValueError: if it cannot draft for this model; says why.
        """
        self.validate_grid(model.grid[0] * model.grid[1])
        return self

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the drafts fit, or can be shortened automatically to, a grid of `tokens` tokens."""

    def fit_to_grid(self, tokens: int) -> Self:
        """Return the drafter with its drafts limited to a grid of `tokens` tokens."""
        return self

    def fit_to_vocab(self, vocab: int) -> Self:
        """Return the drafter with at most `vocab` children per slot."""
        return self

    def fix_length(self, drafts: int) -> Self:
        """Return the drafter with `drafts` draft tokens per pass if their number is automatic, otherwise unchanged."""
        return self

    def with_window(self, window: int | str) -> Self:
        """Return the drafter with another window: the number of tokens fed per pass, or the name of a policy that selects it.

        A drafter without a window is returned unchanged.
        """
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Any:
        """Return the state of B new images after the prefill, whose output is `first`."""
        return None

    def propose(self, state: Any, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        """Return the draft of a pass. Changes nothing in the state except caches, in place.

        Args:
            tokens: int64 `[B, N + max_width]`, valid up to `length` `[B]`. The last valid token is the root.
            noise: noise of the pass; its position `[B, 1]` is that of the token after the root. The drafter takes all random
                numbers from it, for later positions through `Noise.shift`.
        """
        raise NotImplementedError

    def join(self, state: Any, new: Any, rows: Tensor, tokens: Tensor, length: Tensor) -> Any:
        """Return the state of a running batch with new images in some of its rows.

        Args:
            new: state that `start` returned for n images.
            rows: int64 `[n]`, which images of the batch they replace.
            tokens, length: of the whole batch, as in `propose`; the new images have one token.
        """
        return insert_rows(state, new, rows)

    def observe(self, state: Any, step: Step) -> Any:
        """Return the state for the next pass, given the result of this one.

        What a state may hold so that passes can be captured as a CUDA graph: `vargen.decoding.next_token.graphs`.
        """
        return state


VerifyTokens = Callable[[Tensor, Draft], Verdict]


class AcceptanceRule:
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

    def fit_to_grid(self, rows: int, columns: int) -> Self:
        """Return the rule with its sizes limited to a grid."""
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
    """

    vocab: int
    grid: tuple[int, int]


class AutoregressiveHead(DraftHead):
    """A draft head that extrapolates the target's features one token at a time (EAGLE).

    Slot j takes a token and the feature that predicted it, and outputs what predicts the next token. The input features are the
    target's own for tokens that the target has processed, and the head's outputs after that. CFG rows and caches are internal
    to the head, as are the target's final norm and output layer, which produce the logits.
    """

    def start(self, images: int, max_width: int) -> Any:
        """Return the empty state of B images. At most `max_width` slots are fed between two commits."""
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
