"""Methods for block-wise video as data: which blocks are drafted, which drafts are accepted, and when caches are updated.

A policy is data. For each video it starts a `PolicyState`, which decides block by block and keeps what it has observed.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.method import Method, describe_part
from vargen.decoding.video.interfaces import BlockModel
from vargen.decoding.video.stats import BlockOutcome, BlockRecord
from vargen.values import parse_float, parse_int, short_repr


class PolicyState:
    """Decisions of a policy in one video. By default: draft all blocks, and accept those that score at least `tau`.

    Attributes:
        tau: the current threshold; None if none is used. May be set during generation.
    """

    def __init__(self, tau: float | None = None):
        self.tau = tau

    def should_draft(self, block: int) -> bool:
        """Return whether the small model proposes this block."""
        return True

    def should_accept(self, block: int, score: float | None) -> bool:
        """Return whether a draft is accepted; `score` is finite, or None if the policy does not need scores."""
        return self.tau is None or (score is not None and score >= self.tau)

    def observe(self, record: BlockRecord) -> None:
        """Update the state with a finished block."""


class Policy(ABC):
    """Base class of policies. Constructors raise ValueError or TypeError for a value that is not allowed, and name it.

    Attributes:
        needs_scores: whether drafts must be scored. needs_router: whether a trained router must rank them.
    """

    needs_scores: ClassVar[bool] = False
    needs_router: ClassVar[bool] = False

    @abstractmethod
    def start(self, seed: int) -> PolicyState: ...


def validate_threshold(value: Any, name: str = "tau") -> float:
    """Return a threshold as a float; infinite values accept all or nothing."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {short_repr(value)}")
    if math.isnan(value):
        raise ValueError(f"{name} must be a number or infinite, got nan")
    return float(value)


def validate_share(value: Any, name: str) -> None:
    share = parse_float(value)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {short_repr(value)}")


DEFAULT_THRESHOLD = -0.7  # as in the paper, on the scale of ImageReward: mean 0, deviation 1 on its training data


@dataclass(frozen=True)
class Threshold(Policy):
    """Accept a draft that scores at least `tau`."""

    tau: float = DEFAULT_THRESHOLD
    needs_scores = True

    def __post_init__(self) -> None:
        validate_threshold(self.tau)

    def start(self, seed: int) -> PolicyState:
        return PolicyState(self.tau)


class _PlacementState(PolicyState):
    """Draft selected blocks, and accept all drafts."""

    def __init__(self, should_draft: Callable[[int], bool]):
        super().__init__()
        self._should_draft = should_draft

    def should_draft(self, block: int) -> bool:
        return self._should_draft(block)


@dataclass(frozen=True)
class SingleModel(Policy):
    """Generate all blocks with the target, or all with the small model if `draft`."""

    draft: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.draft, bool):
            raise TypeError(f"draft must be True or False, got {short_repr(self.draft)}")

    def start(self, seed: int) -> PolicyState:
        return _PlacementState(lambda block: self.draft)


@dataclass(frozen=True)
class Stride(Policy):
    """Generate every `every`-th block with the target, from block 0 on; nothing is scored (StrideAR)."""

    every: int = 3

    def __post_init__(self) -> None:
        if parse_int(self.every, 1) is None:
            raise ValueError(f"every must be a whole number of at least 1, got {short_repr(self.every)}")

    def start(self, seed: int) -> PolicyState:
        return _PlacementState(lambda block: block % self.every != 0)


@dataclass(frozen=True)
class LearnedRouting(Policy):
    """Accept a draft that a router ranks among the `share` of drafts from which the target would gain least.

    The score of a draft is 1 minus its rank.
    """

    share: float = 0.7
    needs_router = True

    def __post_init__(self) -> None:
        validate_share(self.share, "share")

    def start(self, seed: int) -> PolicyState:
        return PolicyState(1 - self.share)


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
    exit_step: int = 0
    lazy: bool = True
    paradigm: ClassVar[Literal["video"]] = "video"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy must be one such as Threshold(), got {short_repr(self.policy)}")
        blocks = self.target_blocks
        if not isinstance(blocks, tuple | list) or any(parse_int(block, 0) is None for block in blocks):
            raise ValueError(f"target_blocks must be numbers of blocks, from 0, got {short_repr(blocks)}")
        object.__setattr__(self, "target_blocks", tuple(blocks))
        if parse_int(self.exit_step, 0) is None:
            raise ValueError(f"exit_step must be a whole number of at least 0, got {short_repr(self.exit_step)}")
        if not isinstance(self.lazy, bool):
            raise TypeError(f"lazy must be True or False, got {short_repr(self.lazy)}")

    @property
    def drafts(self) -> bool:
        """Whether some blocks may be drafted, by the small model or by fewer steps of the target."""
        return not (isinstance(self.policy, SingleModel) and not self.policy.draft)

    @property
    def needs_draft_model(self) -> bool:
        return self.drafts and not self.exit_step

    @property
    def needs_scorer(self) -> bool:
        return self.policy.needs_scores

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if every block is what the target would generate alone, otherwise `"relaxed"`."""
        return "relaxed" if self.drafts else "exact"

    @property
    def threshold(self) -> float | None:
        """The `tau` of the policy; None if it has none."""
        return getattr(self.policy, "tau", None)

    def with_tau(self, tau: float) -> VideoMethod:
        """Return the method with another threshold.

        Raises:
            ValueError: if the method has no threshold, or for NaN.
            TypeError: if `tau` is not a number.
        """
        value = validate_threshold(tau)
        if self.threshold is None:
            raise ValueError(f"tau must be left out: accelerator {self.name!r} compares no score with a fixed threshold")
        policy: Any = self.policy
        return replace(self, policy=replace(policy, tau=value))

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
        if self.exit_step and self.exit_step >= len(model.levels):
            raise ValueError(f"exit_step must be below the target's {len(model.levels)} steps, got {self.exit_step}")
        if self.needs_scorer and not has_scorer:
            raise ValueError(f"accelerator {self.name!r} needs a scorer, and none is given")
        if self.policy.needs_router and not has_router:
            raise ValueError(f"accelerator {self.name!r} needs a router, which `vargen train router` trains, and there is none")

    @property
    def settings(self) -> dict[str, Any]:
        """The non-default parameters, for display."""
        plain = VideoMethod()
        found = {f"policy {name}": value for name, value in _list_fields(self.policy).items()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "policy", "summary", "source", "experimental") and value != getattr(plain, each.name):
                plainly = value if isinstance(value, int | float) else repr(value)
                found[each.name] = getattr(value, "__name__", plainly)
        return found

    def spec(self) -> dict[str, Any]:
        """Return the complete method as plain values; see `Accelerator.spec`."""
        named = [each.name for each in fields(self) if each.name not in ("name", "summary", "source", "experimental")]
        return {name: describe_part(getattr(self, name)) for name in named}


def _list_fields(part: Any) -> dict[str, Any]:
    """Return the fields of a policy that are set."""
    found = {each.name: getattr(part, each.name) for each in fields(part)} if hasattr(part, "__dataclass_fields__") else {}
    return {name: value for name, value in found.items() if value is not None and value != ()}


class VideoDecisions:
    """Decisions of a method in one video: those of its policy, except for blocks that are always the target's.

    Attributes:
        policy: state of the policy.
    """

    def __init__(self, method: VideoMethod, seed: int):
        self.method, self.policy = method, method.policy.start(seed)

    def reason_not_to_draft(self, block: int) -> BlockOutcome | None:
        """Return the outcome to record if the block is not drafted; None if it is."""
        if block in self.method.target_blocks:
            return "forced"
        return None if self.policy.should_draft(block) else "undrafted"

    def observe(self, record: BlockRecord) -> None:
        """Update the policy with a finished block."""
        self.policy.observe(record)
