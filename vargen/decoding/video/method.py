"""Methods for block-wise video as data: which model generates which block, how drafts are scored, when caches are updated."""

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
        policy: which blocks are drafted, and which drafts are accepted.
        aggregate: reduces scores of frames to one number.
        forced: blocks that the target always generates; block 0 sets the composition of the video.
        longest_run: after this many consecutive accepted drafts, the target generates a block, which bounds drift; None: no
            limit.
        off_after: after this many consecutive rejections, drafting pauses for `off_blocks` blocks; None: never.
        refine: the target finishes a rejected draft from this step, after noise is added to the level of that step; 0 generates
            the block from noise.
        refine_margin: refine only drafts that miss the threshold by at most this much; None: all.
        commit: when the target's cache is updated with finished blocks.
        fused: whether cache updates share the pass of the next block's first step, in both models.

    Raises:
        TypeError, ValueError: if a part is invalid; names it.
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
        """Whether it needs the small model."""
        return not (isinstance(self.policy, SingleModel) and not self.policy.draft)

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if every block is what the target would generate alone, otherwise `"relaxed"`."""
        return "exact" if not self.drafts and self.commit.exact else "relaxed"

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

    def check(self, model: BlockModel, scored: bool) -> None:
        """Raise ValueError unless a model, with a scorer if `scored`, can run the method."""
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
        """The non-default parameters, for display."""
        plain = VideoMethod()
        found = {f"policy {name}": value for name, value in _plain(self.policy).items()}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "policy", "summary", "source", "experimental") and value != getattr(plain, each.name):
                plainly = value if isinstance(value, int | float) else repr(value)
                found[each.name] = getattr(value, "__name__", plainly)
        return found

    def spec(self) -> dict[str, Any]:
        """Return the complete method as plain values; see `Accelerator.spec`."""
        said = [each.name for each in fields(self) if each.name not in ("name", "summary", "source", "experimental")]
        return {name: describe_part(getattr(self, name)) for name in said}


def _plain(part: Any) -> dict[str, Any]:
    """Return the fields of a policy that are set."""
    found = {each.name: getattr(part, each.name) for each in fields(part)} if hasattr(part, "__dataclass_fields__") else {}
    return {name: value for name, value in found.items() if value is not None and value != ()}
