"""What decoding sees of its parts: a model, a drafter, an acceptance rule, a controller of draft lengths.

Shape suffixes: B images, T fed tokens of one pass, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Output, Step, Tree, Verdict
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
class ScaleModel(Protocol):
    """A next-scale model: the tokens of a scale are independent given the coarser scales, and drawn in one pass.

    What crosses from scale to scale, and between models of one image tokenizer, is the *canvas*: the sum of what the scales
    before have contributed. Guidance rows, caches and conditions are the model's own business.

    Attributes:
        vocab: tokens V of the shared codebook.
        scale_tokens: tokens of every scale, coarse to fine.
        scale_codes: how many of the V tokens, the first ones, each scale may draw.
        draft_model: a smaller model of the same image tokenizer; None where there is none.
        cost_key: as of a `TokenModel`.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def scale_tokens(self) -> tuple[int, ...]: ...

    @property
    def scale_codes(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_model(self) -> ScaleModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def start(self, condition: Any) -> Any:
        """The state of B images, which holds no scale. Nothing is run."""

    def canvas(self, batch: int) -> Tensor:
        """What the scales add up to before the first one."""

    def add(self, canvas: Tensor, tokens: Tensor | None, scale: int) -> tuple[Tensor, Tensor | None]:
        """Add the tokens int64 `[B, n]` of a scale, or nothing for None; nothing is changed in place.

        Returns:
            The canvas with them, and what the transformer is fed at the next scale, `[B, n', E]`; None behind the last.
        """

    def forward(self, state: Any, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]:
        """One block-causal pass over the scales that the state does not hold, up to the last of `inputs`; it holds them then.

        Args:
            inputs: by scale, from 0, which has None: what `add` returned.
            count: how many of the last scales logits are wanted of, at most those that this pass feeds.
            guidance: of each of these scales, a factor of the guidance asked for; 0 runs it without the unconditional rows.

        Returns:
            Guided logits of each of these scales, `[B, n, codes]`.
        """

    def rollback(self, state: Any, scale: int) -> None:
        """Forget all scales from `scale` on."""


@runtime_checkable
class BlockModel(Protocol):
    """A model that makes video block by block: a few denoising steps for each, which see clean earlier blocks through a cache.

    Latents cross between models, keys and values never do. Prompts and caches are the model's own business.

    Attributes:
        block_shape: `(F, C, Y, X)` of the latents of a block. levels: noise level of each step, falling, the first one 1.
        fresh_noise: whether a step's estimate is noised anew for the next one (distilled models); else velocity is followed.
        draft_model: a smaller model of the same latents; None where there is none. cost_key: as of a `TokenModel`.
    """

    @property
    def block_shape(self) -> tuple[int, int, int, int]: ...

    @property
    def levels(self) -> tuple[float, ...]: ...

    @property
    def fresh_noise(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_model(self) -> BlockModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def start(self, condition: Any, frames: int) -> Any:
        """The state of one video of at most so many latent frames, which holds none. Nothing is run but what is done once per
        prompt."""

    def switch(self, state: Any, condition: Any) -> None:
        """Go on with another prompt. What the state holds stays as it is."""

    def room(self, state: Any) -> int:
        """How many latent frames one pass may feed, at least a block: more would evict what some of them see."""

    def forward(self, state: Any, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        """One pass over the frames that follow those which the state holds.

        Args:
            clean: finished blocks `[1, F, C, Y, X]`, or a single one of any number of frames; the state holds them then.
            noisy: the block behind them, at the noise level `level`; it is not held, and fed anew in every step.

        Returns:
            What the clean latents of `noisy` are estimated to be, float32 `[1, F, C, Y, X]`; None without it.
        """


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
