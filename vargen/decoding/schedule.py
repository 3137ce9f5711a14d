"""Schedules of next-scale models as data: which model generates which scales, and how guided."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from vargen.decoding.interfaces import ScaleModel
from vargen.decoding.method import Method
from vargen.values import number_field, parse_int, short_repr, validate_fields


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that are generated in the same way.

    Args:
        until: the first scale after this stage, counted from 0, or from the end if negative; a fraction between 0 and 1 of the
            scales, rounded, at least one less than all; None: all remaining scales.
        model: `"target"`, or `"draft"` for the draft model.
        guidance: factor on the guidance scale; 0 skips the unconditional rows, which is half of the work.
    """

    until: int | float | None = None
    model: Literal["target", "draft"] = "target"
    guidance: float = number_field(1.0, 0)

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.model not in ("target", "draft"):
            raise ValueError(f"model must be target or draft, got {short_repr(self.model)}")
        is_fraction = isinstance(self.until, float) and 0 < self.until < 1
        if self.until is not None and not is_fraction and parse_int(self.until, -(2**31)) is None:
            raise ValueError(f"until must be a whole number, a fraction between 0 and 1, or None, got {short_repr(self.until)}")

    def end(self, scales: int) -> int:
        """Return the first scale after this stage, for a model with `scales` scales."""
        if self.until is None:
            return scales
        if 0 < self.until < 1:
            return min(max(1, round(self.until * scales)), scales - 1)
        return int(self.until) + scales * (self.until < 0)


@dataclass(frozen=True)
class ScaleSchedule(Method):
    """A method for next-scale models.

    Attributes:
        stages: consecutive stages; the last must reach the last scale.
    """

    stages: tuple[Stage, ...] = (Stage(),)
    paradigm: ClassVar[Literal["next-scale"]] = "next-scale"

    def __post_init__(self) -> None:
        if not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(f"stages must be a sequence of Stage, got {short_repr(self.stages)}")
        object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        return "exact" if all(stage.model == "target" and stage.guidance == 1 for stage in self.stages) else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.kind == "exact"

    @property
    def settings(self) -> dict[str, Any]:
        """The non-default parameters of the stages, for display, keyed by name and stage number."""
        return {
            f"{each.name} {number}": getattr(stage, each.name)
            for number, stage in enumerate(self.stages, 1)
            for each in fields(stage)
            if getattr(stage, each.name) != each.default
        }

    @property
    def needs_draft_model(self) -> bool:
        return any(stage.model == "draft" for stage in self.stages)

    def assign_stages(self, scales: int) -> tuple[Stage, ...]:
        """Return the stage of each of `scales` scales.

        Raises:
            ValueError: if a stage ends after the last scale or has no scale, or the stages end before the last scale.
        """
        found: list[Stage] = []
        for number, stage in enumerate(self.stages, 1):
            end, first = stage.end(scales), len(found) + 1
            if first > scales:
                raise ValueError(f"stage {number} of {self.name!r} has no scale left: earlier stages generate all {scales}")
            if not first <= end <= scales:
                allowed = f"{first} to {scales}, or from {first - scales} to -1, for a model of {scales} scales"
                raise ValueError(f"until of stage {number} of {self.name!r} must be from {allowed}, got {stage.until}")
            found += [stage] * (end - len(found))
        if len(found) < scales:
            raise ValueError(f"the stages of {self.name!r} end at scale {len(found)} of {scales}: the last needs until=None")
        return tuple(found)

    def bind(self, model: ScaleModel) -> tuple[Stage, ...]:
        """Return the stage of each of the model's scales.

        Raises:
            ValueError: if this model cannot run the schedule; says why.
        """
        if self.needs_draft_model:
            small = model.draft_model
            if small is None:
                raise ValueError(f"{self.name} needs a smaller model of the same image tokenizer: a draft_transformer")
            for name in ("scale_tokens", "scale_codes", "vocab"):
                if (found := getattr(small, name)) != getattr(model, name):
                    raise ValueError(f"the draft model must be of the same image tokenizer: its {name} is {found}")
        stages = self.assign_stages(len(model.scale_tokens))
        for scale, stage in enumerate(stages):
            if stage.guidance > 0 and any(each.model == stage.model and not each.guidance for each in stages[:scale]):
                raise ValueError(f"guidance of the {stage.model} model cannot resume at scale {scale} of {self.name!r}")
        return stages
