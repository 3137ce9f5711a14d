"""What token-by-token decoding sees of its parts: a model, a drafter, an acceptance rule.

Shape suffixes: B images, T fed tokens of one pass, N tokens of the grid, V vocabulary.
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
    """A next-token model. Guidance rows, caches and conditions are its own business.

    Attributes:
        codebook: float `[V, C]`, vectors that say how alike two tokens are; None where there are none.
        draft_model: a smaller model of the same tokens; None where there is none.
        cost_key: names what the seconds of a pass depend on beside batch and machine: sizes, dtype, guidance, compilation. None
            for models whose costs are not to be kept.
    """

    @property
    def vocab(self) -> int:
        """Legal image tokens, 0 to V - 1."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, decoded in raster order."""

    @property
    def device(self) -> torch.device: ...

    @property
    def codebook(self) -> Tensor | None: ...

    @property
    def draft_model(self) -> TokenModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def prefill(self, condition: Any, max_fed: int) -> tuple[Any, Output]:
        """Start B images: the state, and the output whose one row says what token 0 is. No later pass feeds more than `max_fed`
        tokens."""

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` behind what each row holds; the output says what follows each."""

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        """Keep the first `count` slots of `path` from the last pass (see `Verdict`), forget the others."""

    def rollback(self, state: Any, length: Tensor) -> None:
        """Forget all but the first `length` `[B]` tokens that each row was fed."""


@runtime_checkable
class MovingModel(Protocol):
    """A `TokenModel` whose passes may do what cannot be captured in a graph."""

    @property
    def moving(self) -> str | None:
        """What, such as `"weights are moved in a pass"`; None: nothing."""


@runtime_checkable
class LayeredModel(Protocol):
    """A `TokenModel` that can run without some of its layers."""

    @property
    def layers(self) -> int:
        """How many it has, numbered from 0."""

    def skipping(self, layers: Sequence[int]) -> TokenModel:
        """The model without these layers, with states of its own. Nothing is copied.

        Raises:
            ValueError: for layers that it has not, or if it cannot just now, saying why.
        """


@runtime_checkable
class ExampleModel(Protocol):
    """A `TokenModel` that knows tokens of pictures, such as those that it was trained on."""

    @property
    def examples(self) -> Tensor | None:
        """Integers `[M, N]`, the same tensor for as long as they are the same; None where there are none."""


@runtime_checkable
class LowResModel(Protocol):
    """Draws a picture at a low resolution and says what it makes likely at the target's.

    Attributes:
        vocab, grid: of the target.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    def start(self, condition: Any, seeds: Tensor, sampling: Sampling) -> Any:
        """The state of B images: their pictures at the low resolution."""

    def refresh(self, state: Any, tokens: Tensor, committed: Tensor) -> Any:
        """The state with the pictures at the low resolution as the first `committed` `[B]` of tokens `[B, M]` show them, and
        drawn anew from there. It depends on nothing else, but for noise that nothing else is drawn with."""

    def probs(self, state: Any, tokens: Tensor, length: Tensor, position: Tensor) -> Tensor:
        """Probabilities float32 `[B, S, V]` of the target's tokens at positions `[B, S]`, as drafts are drawn from them.

        They may depend on the first `length` `[B]` of tokens `[B, M]`, which are drawn or drafted, and on noise that nothing
        else is drawn with (`derived`), on nothing else.
        """


@runtime_checkable
class UpscaledModel(Protocol):
    """A `TokenModel` that has, or may have, a low-resolution model beside it."""

    @property
    def low_res(self) -> LowResModel | None: ...


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes tokens. Holds no state of its own between images: what it needs lives in the object `start` returns."""

    @property
    def max_fed(self) -> int:
        """Most tokens T that a pass feeds, the root included."""

    @property
    def topology(self) -> str:
        """`"chain"` or `"tree"`, what it proposes."""

    def bind(self, model: TokenModel) -> Drafter[State]:
        """The drafter for a model, before anything is allocated.

        Raises:
            ValueError: if it cannot draft for this model, saying why.
        """

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> State:
        """The state of B new images, behind the prefill, whose output is `first`."""

    def propose(self, state: State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        """The draft of pass `step`, a number for `Noise`, of the host or of the device. `tokens` `[B, N + max_fed]` are
        meaningful up to `length` `[B]`; the last is the root."""

    def observe(self, state: State, step: Step) -> None:
        """See what the pass made of the draft."""


@runtime_checkable
class SizedDrafter(Protocol):
    """A drafter whose drafts have a length, which a grid may not hold."""

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the drafts fit a grid of so many tokens, or shrink to it."""

    def fitted(self, tokens: int) -> Drafter[Any]:
        """The drafter with its drafts cut to a grid of so many tokens."""

    def resized(self, window: int | str) -> Drafter[Any]:
        """The drafter with another window: fed tokens of a pass, or the name of a rule. What has no window stays."""


@runtime_checkable
class PricedDrafter(Protocol):
    """A drafter that takes time beside the target's passes."""

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Seconds of drafting so many tokens for each of `images`, measured."""


@runtime_checkable
class BranchingDrafter(Protocol):
    """A drafter whose slots have several children."""

    def narrowed(self, vocab: int) -> Drafter[Any]:
        """The drafter with no more children of a slot than a vocabulary of so many tokens has."""


@runtime_checkable
class OfferingDrafter(Protocol):
    """A drafter that says how it draws, for rules that need more than to know q.

    Attributes:
        offers: `"fresh"` if every draft is drawn anew in every pass, with coins that no other draft depends on, in this pass or
            another; `"replacement"` if siblings are drawn independently of each other, and as many whatever is drawn.
    """

    @property
    def offers(self) -> tuple[str, ...]: ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """A pure function of the target's probabilities behind each fed slot, the draft, the noise, and the relaxation so far.

    Attributes:
        exact: whether the output follows the target's probabilities.
        topologies: what it can judge, `"chain"` and `"tree"`.
    """

    @property
    def exact(self) -> bool: ...

    @property
    def topologies(self) -> tuple[str, ...]: ...

    def bind(self, model: TokenModel) -> AcceptanceRule:
        """The rule for a model: it fills in what it needs to know of it, such as its codebook. Most need nothing.

        Raises:
            ValueError: if the model lacks it.
        """

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """Judge a draft.

        Args:
            probs: float32 `[B, T, V]`; row t is the target's behind fed slot t.
            draft: T - 1 tokens per image.
            noise: its positions `[B, T]` are those of the token that follows each slot.
            relaxation: float32 `[B]`, granted to the image by earlier passes. Exact rules ignore it.
        """


@runtime_checkable
class AutoregressiveHead(Protocol):
    """A trained drafter that continues a target's features token by token (EAGLE).

    Slot j takes a token and the feature that predicted it, and returns what predicts the next: the target's features where it
    has seen the token before, its own beyond. Guidance rows and caches are its own business, as are the target's norm and
    output layer, with which it makes logits.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    def start(self, images: int, max_fed: int) -> Any:
        """The state of B images that hold nothing. No later passes feed more than `max_fed` slots between two commits."""

    def forward(self, tokens: Tensor, features: Tensor, state: Any, tree: Tree) -> Output:
        """Feed tokens `[B, T]` with features `[R, T, D]`: the last T slots of `tree`, of which passes since the last commit
        have fed the others. Logits `[B, T, V]` after guidance, and features `[R, T, D]`, say what follows each."""

    def commit(self, state: Any, count: Tensor) -> None:
        """Keep the first `count` `[B]` slots of what was fed, forget the others."""


@runtime_checkable
class ParallelHeads(Protocol):
    """Trained heads that predict several tokens ahead from one feature of a target (Medusa)."""

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def heads(self) -> int:
        """Tokens ahead, h."""

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        """Logits `[B, h, V]` after guidance, of the h tokens that follow tokens `[B]` at positions `[B]`, which the target drew
        by its features `[R, 1, D]`; none given the others."""


@runtime_checkable
class HeadedModel(Protocol):
    """A `TokenModel` that has, or may have, drafters trained on its features.

    Attributes:
        eagle, medusa: those; None where there is none.
    """

    @property
    def eagle(self) -> AutoregressiveHead | None: ...

    @property
    def medusa(self) -> ParallelHeads | None: ...
