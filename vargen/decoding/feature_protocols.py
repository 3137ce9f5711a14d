"""What decoding sees of drafters that are trained on a target's features.

Shape suffixes: B images, R rows of the target (B times its guidance halves), T fed slots of one pass, D width, V vocabulary, h
heads.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from vargen.decoding.draft import Output, Tree


@runtime_checkable
class FeatureModel(Protocol):
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
class FeatureHeads(Protocol):
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
    def eagle(self) -> FeatureModel | None: ...

    @property
    def medusa(self) -> FeatureHeads | None: ...
