"""Interfaces of next-token decoding: the model, the drafter, and the acceptance rule.

Shape suffixes: B images, T tokens fed in one pass, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree, Verdict
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling

State = TypeVar("State")


@runtime_checkable
class TokenModel(Protocol):
    """A next-token model. CFG rows, caches and conditions are internal to the model.

    Attributes:
        codebook: float `[V, C]`, embedding vectors that define the similarity of tokens; None if the model has none.
        draft_model: a smaller model with the same tokens; None if there is none.
        cost_key: identifies what the cost of a pass depends on besides batch size and machine: model sizes, dtype, guidance,
            compilation. None disables caching of measured costs.
    """

    @property
    def vocab(self) -> int:
        """Number V of legal image tokens, 0 to V - 1."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the token grid, decoded in raster order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def codebook(self) -> Tensor | None: ...

    @property
    def draft_model(self) -> TokenModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def prefill(self, condition: Any, max_fed: int) -> tuple[Any, Output]:
        """Start B images.

        Returns the state, and an output with one position, which predicts token 0. Later passes feed at most `max_fed` tokens.
        """

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` after those already in the cache of each row.

        The output at each slot predicts the token that follows it.
        """

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        """Keep the first `count` slots of `path` from the last pass (see `Verdict`) and discard the others."""

    def rollback(self, state: Any, length: Tensor) -> None:
        """Truncate the state of each row to its first `length` `[B]` tokens."""


@runtime_checkable
class MovingModel(Protocol):
    """A `TokenModel` whose passes may contain operations that a CUDA graph cannot capture."""

    @property
    def moving(self) -> str | None:
        """Name of the operation, such as `"weights are moved in a pass"`; None if there is none."""


@runtime_checkable
class LayeredModel(Protocol):
    """A `TokenModel` that can run with some of its layers skipped."""

    @property
    def layers(self) -> int:
        """Number of layers, indexed from 0."""

    def skipping(self, layers: Sequence[int]) -> TokenModel:
        """Return a view of the model without these layers. It has its own states; weights are not copied.

        Raises:
            ValueError: if a layer does not exist, or the model cannot skip layers in its current state; says why.
        """


@runtime_checkable
class ExampleModel(Protocol):
    """A `TokenModel` that provides tokens of images, such as its training images."""

    @property
    def examples(self) -> Tensor | None:
        """Integer tensor `[M, N]`; None if there are none.

        The same tensor object is returned as long as its contents are unchanged.
        """


@runtime_checkable
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

    def refresh(self, state: Any, tokens: Tensor, committed: Tensor) -> Any:
        """Update the low-resolution images to match the first `committed` `[B]` of tokens `[B, M]`, and resample the remainder.

        Apart from these tokens, the new state may depend only on noise that is used for nothing else.
        """

    def probs(self, state: Any, tokens: Tensor, length: Tensor, position: Tensor) -> Tensor:
        """Probabilities float32 `[B, S, V]` of the target's tokens at positions `[B, S]`, from which draft tokens are sampled.

        They may depend only on the first `length` `[B]` of tokens `[B, M]`, whether committed or drafted, and on noise that is
        used for nothing else (`derived`).
        """


@runtime_checkable
class UpscaledModel(Protocol):
    """A `TokenModel` that may come with a low-resolution model."""

    @property
    def low_res(self) -> LowResModel | None: ...


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes draft tokens. Keeps no state of its own between images; all state lives in the object that `start` returns."""

    @property
    def max_fed(self) -> int:
        """Maximum number T of tokens fed in one pass, root included."""

    @property
    def topology(self) -> str:
        """Shape of its drafts: `"chain"` or `"tree"`."""

    def bind(self, model: TokenModel) -> Drafter[State]:
        """Return the drafter for a model; called before anything is allocated.

        Raises:
            ValueError: if it cannot draft for this model; says why.
        """

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> State:
        """Return the state of B new images after the prefill, whose output is `first`."""

    def propose(self, state: State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        """Return the draft of pass `step`.

        Args:
            tokens: int64 `[B, N + max_fed]`, valid up to `length` `[B]`. The last valid token is the root.
            step: pass number, used by `Noise`; an int or a device tensor.
        """

    def observe(self, state: State, step: Step) -> None:
        """Update the state with the result of the pass."""


@runtime_checkable
class SizedDrafter(Protocol):
    """A drafter whose drafts have a length that may exceed the grid."""

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the drafts fit, or can be shortened to, a grid of `tokens` tokens."""

    def fitted(self, tokens: int) -> Drafter[Any]:
        """Return the drafter with its drafts limited to a grid of `tokens` tokens."""

    def resized(self, window: int | str) -> Drafter[Any]:
        """Return the drafter with another window: the number of tokens fed per pass, or the name of a policy that selects it.

        A drafter without a window is returned unchanged.
        """


@runtime_checkable
class PricedDrafter(Protocol):
    """A drafter whose own cost adds to that of the target passes."""

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Measured seconds to draft `drafts` tokens for each of `images` images."""


@runtime_checkable
class BranchingDrafter(Protocol):
    """A drafter that proposes several children per slot."""

    def narrowed(self, vocab: int) -> Drafter[Any]:
        """Return the drafter with at most `vocab` children per slot."""


@runtime_checkable
class OfferingDrafter(Protocol):
    """A drafter that declares how it samples, for rules that need more than q.

    Attributes:
        offers: `"fresh"` if every draft token is resampled in every pass, with uniforms that no other draft token of this or
            any other pass depends on; `"replacement"` if siblings are sampled independently of each other and their number does
            not depend on the samples.
    """

    @property
    def offers(self) -> tuple[str, ...]: ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """A pure function of the target distribution after each fed slot, the draft, the noise, and the relaxation spent so far.

    Attributes:
        exact: whether the output is distributed as the target.
        topologies: which drafts it can verify, of `"chain"` and `"tree"`.
    """

    @property
    def exact(self) -> bool: ...

    @property
    def topologies(self) -> tuple[str, ...]: ...

    def bind(self, model: TokenModel) -> AcceptanceRule:
        """Return the rule for a model, with whatever it needs from it, such as the codebook. Most rules need nothing.

        Raises:
            ValueError: if the model lacks what the rule needs.
        """

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """Verify a draft.

        Args:
            probs: float32 `[B, T, V]`; row t is the target distribution after fed slot t.
            draft: T - 1 tokens per image.
            noise: its positions `[B, T]` are those of the token after each slot.
            relaxation: float32 `[B]`, relaxation that the image spent in earlier passes. Ignored by exact rules.
        """


@runtime_checkable
class AutoregressiveHead(Protocol):
    """A trained draft head that extrapolates the target's features one token at a time (EAGLE).

    Slot j takes a token and the feature that predicted it, and outputs what predicts the next token. The input features are the
    target's own for tokens that the target has processed, and the head's outputs after that. CFG rows and caches are internal
    to the head, as are the target's final norm and output layer, which produce the logits.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    def start(self, images: int, max_fed: int) -> Any:
        """Return the empty state of B images. At most `max_fed` slots are fed between two commits."""

    def forward(self, tokens: Tensor, features: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` with features `[R, T, D]`.

        They are the last T slots of `tree`; the earlier slots were fed by previous calls since the last commit. Returns logits
        `[B, T, V]` after guidance and features `[R, T, D]`, which predict the token after each slot.
        """

    def commit(self, state: Any, count: Tensor) -> None:
        """Keep the first `count` `[B]` of the slots fed since the last commit and discard the others."""


@runtime_checkable
class ParallelHeads(Protocol):
    """Trained draft heads that predict several tokens ahead from one feature of the target (Medusa)."""

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def heads(self) -> int:
        """Number h of tokens predicted ahead."""

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        """Logits `[B, h, V]` after guidance for the h tokens that follow tokens `[B]` at positions `[B]`.

        The target sampled these tokens from its features `[R, 1, D]`. The h predictions are independent of each other.
        """
