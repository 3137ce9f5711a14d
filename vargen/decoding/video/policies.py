"""Methods for block-wise video as data: which blocks are drafted, which drafts are accepted, and when caches are updated."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.methods import Method, register_presets
from vargen.decoding.video.interfaces import BlockModel
from vargen.decoding.video.stats import BlockRecord
from vargen.values import number_field, parse_int, short_repr, validate_fields


def validate_threshold(value: Any) -> float:
    """Return a threshold as a float; infinite values accept all or nothing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ValueError(f"tau must be a number or infinite, got {short_repr(value)}")
    return float(value)


class Policy:
    """Base class of policies, which are immutable: what a policy observes of a video are the records of its finished blocks.

    By default, all blocks are drafted, and drafts that score at least `BlockStream.tau` are accepted.

    Attributes:
        needs_scores: whether drafts must be scored. needs_router: whether a trained router must rank them.
        tau: the threshold of scores at the start of a video; None to accept all drafts.
    """

    needs_scores: ClassVar[bool] = False
    needs_router: ClassVar[bool] = False

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def tau(self) -> float | None:
        return None

    def should_draft(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        """Return whether a block is drafted.

        Args:
            record: of the block, with its number and the seed of the video. finished: those of all earlier blocks.
        """
        return True

    def should_accept(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        """Return whether a draft is accepted; `record` has the current `tau` and, if drafts are scored or ranked, a score."""
        return record.tau is None or (record.score is not None and record.score >= record.tau)


@dataclass(frozen=True)
class Threshold(Policy):
    """Accept a draft that scores at least `tau`."""

    tau: float = -0.7  # as in the paper, on the scale of ImageReward: mean 0, deviation 1 on its training data
    needs_scores = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", validate_threshold(self.tau))


@dataclass(frozen=True)
class LearnedRouting(Policy):
    """Accept a draft that a router ranks among the `share` of drafts from which the target would gain least.

    The score of a draft is 1 minus its rank.
    """

    share: float = number_field(0.7, 0, 1)
    needs_router = True

    @property
    def tau(self) -> float:
        return 1 - self.share


@dataclass(frozen=True)
class SingleModel(Policy):
    """Generate all blocks with the target, or draft all if `draft`; drafts that are not finite are errors, not rejected."""

    draft: bool = False

    def should_draft(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        return self.draft


@dataclass(frozen=True)
class Stride(Policy):
    """Generate every `every`-th block with the target, from block 0 on; nothing is scored (StrideAR)."""

    every: int = number_field(3, 1, is_integer=True)

    def should_draft(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        return record.number % self.every != 0


@dataclass(frozen=True)
class VideoMethod(Method):
    """A method for block-wise video models.

    Attributes:
        policy: which blocks are drafted, and which drafts are accepted.
        target_blocks: blocks that the target always generates; block 0 sets the composition of the video.
        exit_step: the draft is the target's own clean estimate after this many steps, and a rejected block goes on from there;
            no small model is needed. 0: the small model drafts.
        lazy: whether the target's cache is updated only when the target is needed, instead of after every block.

    Raises:
        TypeError, ValueError: if a part is invalid; names it.
    """

    policy: Policy = SingleModel()
    target_blocks: tuple[int, ...] = (0,)
    exit_step: int = number_field(0, 0, is_integer=True)
    lazy: bool = True
    paradigm: ClassVar[Literal["video"]] = "video"

    def __post_init__(self) -> None:
        validate_fields(self)
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy must be one such as Threshold(), got {short_repr(self.policy)}")
        blocks = self.target_blocks
        if not isinstance(blocks, tuple | list) or any(parse_int(block, 0) is None for block in blocks):
            raise ValueError(f"target_blocks must be numbers of blocks, from 0, got {short_repr(blocks)}")
        object.__setattr__(self, "target_blocks", tuple(blocks))

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if every block is what the target would generate alone, otherwise `"relaxed"`."""
        return "exact" if self.policy == SingleModel() else "relaxed"

    @property
    def parts(self) -> dict[str, Any]:
        return {"policy": self.policy, "itself": self}

    @property
    def needs_draft_model(self) -> bool:
        """Whether a small model drafts, and not an early exit of the target."""
        return self.kind == "relaxed" and not self.exit_step

    @property
    def threshold(self) -> float | None:
        """The `tau` of a policy that scores drafts; None for others."""
        return self.policy.tau if self.policy.needs_scores else None

    def with_tau(self, tau: float) -> VideoMethod:
        """Return the method with another threshold.

        Raises:
            ValueError: if the method has no threshold, or `tau` is not a number.
        """
        if self.threshold is None:
            raise ValueError(f"tau must be left out: accelerator {self.name!r} compares no score with a fixed threshold")
        policy: Any = self.policy
        return replace(self, policy=replace(policy, tau=validate_threshold(tau)))

    def validate_models(self, model: BlockModel, has_scorer: bool, has_router: bool = False) -> None:
        """Raise ValueError if the models, or a missing scorer or router, do not allow to run the method."""
        draft = model.draft_model
        if self.needs_draft_model and draft is None:
            raise ValueError(f"accelerator {self.name!r} needs a model to draft with, and this one has none")
        if self.needs_draft_model and draft is not None and draft.block_shape != model.block_shape:
            raise ValueError(
                f"the drafter's blocks have latents {list(draft.block_shape)}, the target's {list(model.block_shape)} "
                "[F, C, Y, X]: latents cross between them, so they must be equal"
            )
        if self.exit_step and not model.levels:
            raise ValueError(f"accelerator {self.name!r} leaves the steps of a block early, and this model runs them itself")
        if self.exit_step and self.exit_step >= len(model.levels):
            raise ValueError(f"exit_step must be below the target's {len(model.levels)} steps, got {self.exit_step}")
        if self.policy.needs_scores and not has_scorer:
            raise ValueError(f"accelerator {self.name!r} needs a scorer, and none is given")
        if self.policy.needs_router and not has_router:
            raise ValueError(f"accelerator {self.name!r} needs a router, which `vargen train router` trains, and there is none")


register_presets(
    VideoMethod(
        name="target",
        summary="the large model generates every block: the baseline",
        source="Huang et al. 2025, Self Forcing, arXiv 2506.08009",
    ),
    VideoMethod(
        name="sdvg",
        policy=Threshold(),
        summary="the small model drafts; the large model generates blocks whose worst frame scores below tau",
        source="Hu and Zhang 2026, SDVG, arXiv 2604.17397, with lazy cache updates",
    ),
    VideoMethod(
        name="sdvg-learned",
        policy=LearnedRouting(0.9),
        summary="sdvg that a trained router decides, from what the small model computed; nothing is decoded or scored",
        source="as sdvg",
    ),
    VideoMethod(
        name="stride",
        policy=Stride(),
        summary="the large model generates every third block, without scores: what a scorer must beat",
        source="StrideAR, a public model card",
    ),
    VideoMethod(
        name="early-exit",
        policy=SingleModel(draft=True),
        exit_step=1,
        summary="the large model stops after its first step, in every block but the first; no small model",
        source="as target; consistency models make such estimates: Song et al. 2023, arXiv 2303.01469",
        experimental=True,
    ),
)
