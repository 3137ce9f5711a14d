"""Methods for block-wise video as data: who draws which block, what a draft is judged by, and when models see the result."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.method import Method, describe_part
from vargen.decoding.video.denoising import Commit, Lazy
from vargen.decoding.video.policies import Policy, SingleModel, validate_threshold
from vargen.decoding.video.protocols import BlockModel
from vargen.decoding.video.scoring import Aggregator, lowest
from vargen.values import parse_int, short_repr

_ALWAYS: Policy = SingleModel()
_LAZY: Commit = Lazy()


@dataclass(frozen=True)
class VideoMethod(Method):
    """A method for block-wise video models.

    Attributes:
        policy: which blocks are drafted, and which drafts stand.
        aggregate: from scores of frames to one number.
        forced: blocks that the target draws whatever the policy says: 0 fixes the composition of a video.
        longest_run: after so many drafts that stood in a row, the target draws a block, which bounds drift; None for no bound.
        off_after: after so many rejections in a row no block is drafted for `off_blocks` blocks; None never stops drafting.
        refine: a rejected draft is noised to the level of this step of the target, and finished by it from there; 0 draws the
            block anew. refine_margin: only of drafts that miss the threshold by at most so much; None of all.
        commit: when the target sees finished blocks. fused: whether they share the pass of the next block's first step, in both
            models.

    Raises:
        TypeError, ValueError: for a part that is none, naming it.
    """

    policy: Policy = _ALWAYS
    aggregate: Aggregator = lowest
    forced: tuple[int, ...] = (0,)
    longest_run: int | None = None
    off_after: int | None = None
    off_blocks: int = 8
    refine: int = 0
    refine_margin: float | None = None
    commit: Commit = _LAZY
    fused: bool = False
    paradigm: ClassVar[Literal["video"]] = "video"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind, example in (("policy", Policy, "Threshold()"), ("commit", Commit, "Lazy()")):
            value = getattr(self, name)
            if isinstance(value, type) or not isinstance(value, kind):
                raise TypeError(f"{name} must be one such as {example}, got {short_repr(value)}")
        if isinstance(self.aggregate, type) or not callable(self.aggregate):
            raise TypeError(f"aggregate must be a function of scores, such as lowest or mean, got {short_repr(self.aggregate)}")
        if not isinstance(self.forced, tuple | list) or any(parse_int(block, 0) is None for block in self.forced):
            raise ValueError(f"forced must be numbers of blocks, from 0, got {short_repr(self.forced)}")
        object.__setattr__(self, "forced", tuple(self.forced))
        for name, least in (("longest_run", 1), ("off_after", 1), ("off_blocks", 1), ("refine", 0)):
            value = getattr(self, name)
            if parse_int(value, least) is None and not (value is None and name in ("longest_run", "off_after")):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {short_repr(value)}")
        if self.refine_margin is not None:
            validate_threshold(self.refine_margin, "refine_margin")
        if not isinstance(self.fused, bool):
            raise TypeError(f"fused must be True or False, got {short_repr(self.fused)}")

    @property
    def drafts(self) -> bool:
        """Whether it needs the smaller model."""
        return not (isinstance(self.policy, SingleModel) and not self.policy.draft)

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` when every block is the target's own, as it would draw it alone."""
        return "exact" if not self.drafts and self.commit.exact else "relaxed"

    @property
    def threshold(self) -> float | None:
        """The `tau` of the policy, None where it has none."""
        return getattr(self.policy, "tau", None)

    def with_tau(self, tau: float) -> VideoMethod:
        """The method with another threshold.

        Raises:
            ValueError: if it has none, or for NaN. TypeError: for what is no number.
        """
        value = validate_threshold(tau)
        if self.threshold is None:
            raise ValueError(f"tau must be left out: accelerator {self.name!r} compares no score with a fixed threshold")
        policy: Any = self.policy
        return replace(self, policy=replace(policy, tau=value))

    def check(self, model: BlockModel, scored: bool) -> None:
        """Raise ValueError unless a model, and a scorer where `scored`, can run it."""
        draft = model.draft_model
        if self.drafts and draft is None:
            raise ValueError(f"accelerator {self.name!r} needs a model to draft with, and this one has none")
        if self.drafts and draft is not None and draft.block_shape != model.block_shape:
            raise ValueError(
                f"the drafter's blocks have latents {list(draft.block_shape)}, the target's {list(model.block_shape)} "
                "[F, C, Y, X]: latents cross between them, so they must be equal"
            )
        if self.refine >= len(model.levels) and self.refine:
            raise ValueError(f"refine must be below the target's {len(model.levels)} steps, got {self.refine}")
        if (self.policy.scored or self.policy.reference) and not scored:
            raise ValueError(f"accelerator {self.name!r} needs a scorer, and none is given")

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets, for people."""
        plain = VideoMethod()
        found = {f"policy {name}": value for name, value in _plain(self.policy).items()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "policy", "summary", "source", "experimental") and value != getattr(plain, each.name):
                plainly = value if isinstance(value, int | float) else repr(value)
                found[each.name] = getattr(value, "__name__", plainly)
        return found

    def spec(self) -> dict[str, Any]:
        """What the method is, whole, as plain values; see `Accelerator.spec`."""
        said = [each.name for each in fields(self) if each.name not in ("name", "summary", "source", "experimental")]
        return {name: describe_part(getattr(self, name)) for name in said}


def _plain(part: Any) -> dict[str, Any]:
    """The fields of a policy."""
    found = {each.name: getattr(part, each.name) for each in fields(part)} if hasattr(part, "__dataclass_fields__") else {}
    return {name: value for name, value in found.items() if value is not None and value != ()}
