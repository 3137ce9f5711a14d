"""The presets of all paradigms, and method strings: the name of a preset with settings, as in `gumbel:window=8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from vargen.decoding.experimental import EXPERIMENTAL_METHODS, EXPERIMENTAL_RULES
from vargen.decoding.interfaces import AcceptanceRule
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.method import DEFAULT_METHOD, NAMING, Accelerator, Method
from vargen.decoding.relaxed_rules import GroupedRule, NeighborhoodRule, PooledRule
from vargen.decoding.rules import shared_noise, speculative_sampling
from vargen.decoding.schedule import ScaleSchedule, Stage
from vargen.decoding.speculative import Speculative
from vargen.decoding.tree_drafters import DynamicTree, Eagle, Medusa
from vargen.decoding.tree_rules import traversal
from vargen.decoding.video.policies import LearnedRouting, SingleModel, Stride, Threshold, VideoMethod
from vargen.specs import parse_spec
from vargen.values import resolve_name, short_repr, suggest_names

NEXT_TOKEN_METHODS: tuple[Accelerator, ...] = (
    Accelerator(
        name=DEFAULT_METHOD,
        drafter=Jacobi(window="auto", coupling="gumbel"),
        acceptance=shared_noise,
        summary="the image of ar: gumbel where measured costs show that drafting pays off, otherwise one token per pass",
        source="as gumbel",
    ),
    Accelerator(
        name="ar",
        summary="one token per pass, in raster order: the sequential baseline",
        source="Sun et al. 2024, LlamaGen",
    ),
    Accelerator(
        name="sjd",
        drafter=Jacobi(window=16, coupling="independent"),
        acceptance=speculative_sampling,
        summary="a window of draft tokens, resampled from the last pass; p/q acceptance",
        source="Teng et al. 2024, arXiv 2410.01699",
    ),
    Accelerator(
        name="scd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=speculative_sampling,
        summary="sjd that keeps draft tokens by maximal coupling",
        source="SCD 2025, arXiv 2510.24211",
    ),
    Accelerator(
        name="gumbel",
        drafter=Jacobi(window=16, coupling="gumbel"),
        acceptance=shared_noise,
        summary="the same image as ar for the same seed, in fewer passes",
        source="SCD 2025, arXiv 2510.24211, with shared-noise acceptance",
    ),
    Accelerator(
        name="gsd",
        drafter=Jacobi(window=16, coupling="maximal"),
        acceptance=GroupedRule(),
        summary="scd that accepts a draft token by the total probability of a group of tokens",
        source="So et al. 2025, arXiv 2508.07747",
    ),
    Accelerator(
        name="mulo-exact",
        drafter=Jacobi(window=32, coupling="maximal", initial="low-res"),
        acceptance=speculative_sampling,
        summary="scd whose first draft tokens come from a low-resolution image",
        source="MuLo-SD 2026, arXiv 2601.05149, with p/q acceptance",
    ),
    Accelerator(
        name="mulo",
        drafter=Jacobi(window=32, coupling="from-verdict", initial="low-res"),
        acceptance=PooledRule(size=100, radius=2),
        summary="drafts from a low-resolution image, accepted where similar tokens are probable, resampled elsewhere",
        source="MuLo-SD 2026, arXiv 2601.05149",
    ),
    Accelerator(
        name="speculative",
        drafter=Speculative(),
        acceptance=speculative_sampling,
        summary="a small model drafts a chain; p/q acceptance",
        source="Leviathan et al. 2023, arXiv 2211.17192",
    ),
    Accelerator(
        name="eagle",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=traversal,
        summary="a trained layer drafts a tree by sampling, which is verified by whole paths",
        source="Li et al. 2024, arXiv 2401.15077 and 2406.16858, with traversal verification",
    ),
    Accelerator(
        name="lantern",
        drafter=Eagle(DynamicTree(nodes=23, depth=8, children=3, frontier=3)),
        acceptance=NeighborhoodRule(),
        summary="the tree of eagle, each draft token accepted by the total probability of similar tokens",
        source="Jang et al. 2024, LANTERN, arXiv 2410.03355, and Park et al. 2025, LANTERN++, arXiv 2502.06352",
    ),
    Accelerator(
        name="medusa",
        drafter=Medusa(DynamicTree(nodes=15, depth=3, children=3)),
        acceptance=traversal,
        summary="trained heads draft several tokens at once, as a tree, which is verified by whole paths",
        source="Cai et al. 2024, arXiv 2401.10774, with traversal verification",
    ),
)

NEXT_SCALE_METHODS: tuple[ScaleSchedule, ...] = (
    ScaleSchedule(
        name="plain",
        summary="one scale per pass: the sequential baseline",
        source="Tian et al. 2024, VAR, arXiv 2404.02905",
    ),
    ScaleSchedule(
        name="code",
        stages=(Stage(until=0.8), Stage(model="draft")),
        summary="collaborative decoding: the small model generates the last fifth of the scales, half of the tokens or more",
        source="Chen et al. 2024, CoDe, arXiv 2411.17787",
    ),
    ScaleSchedule(
        name="economy",
        stages=(Stage(until=-1), Stage(guidance=0)),
        summary="the last scale without guidance, at half the cost",
        source="as plain",
        experimental=True,
    ),
)

VIDEO_METHODS: tuple[VideoMethod, ...] = (
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
        name="early-exit",
        policy=SingleModel(draft=True),
        exit_step=1,
        summary="the large model stops after its first step, in every block but the first; no small model",
        source="as target; consistency models make such estimates: Song et al. 2023, arXiv 2303.01469",
        experimental=True,
    ),
    VideoMethod(
        name="stride",
        policy=Stride(),
        summary="the large model generates every third block, without scores: what a scorer must beat",
        source="StrideAR, a public model card",
    ),
)

_ALL: tuple[tuple[Method, ...], ...] = ((*NEXT_TOKEN_METHODS, *EXPERIMENTAL_METHODS), NEXT_SCALE_METHODS, VIDEO_METHODS)
# By name; of each paradigm the core methods first.
PRESETS: dict[str, Any] = {
    method.name: method for methods in _ALL for method in sorted(methods, key=lambda method: method.experimental)
}

# Rules by the name that the setting `acceptance` selects.
RULES: dict[str, AcceptanceRule] = {
    "speculative-sampling": speculative_sampling,
    "shared-noise": shared_noise,
    "traversal": traversal,
    "grouped": GroupedRule(),
    "neighborhood": NeighborhoodRule(),
    "pooled": PooledRule(),
    **EXPERIMENTAL_RULES,
}


def list_methods(paradigm: str) -> list[Any]:
    """The presets for models of a paradigm, such as `"next-token"`; core methods first."""
    return [preset for preset in PRESETS.values() if preset.paradigm == paradigm]


def resolve_method(accelerator: Any, paradigm: str = "next-token") -> Any:
    """Return the method for a method string or preset name, or the given method object itself.

    Settings after the name change the method's parts: the drafter and rule, `gsd:budget=5,window=24`; the stages of a schedule,
    by number, `code:until.1=-3`; a video method and its policy, `sdvg:tau=2,lazy=false`. `acceptance` replaces the rule of
    the preset by one of `RULES`: `scd:acceptance=typical,alpha=0.2,budget=5`. The resulting method is named by the string as
    written.

    Args:
        paradigm: of the model that will run the method.

    Raises:
        ValueError: if the name is unknown (suggests the nearest), a setting is unknown or invalid (names it and what is
            allowed), or the method belongs to another paradigm.
        TypeError: if `accelerator` is neither a string nor a method.
    """
    names = [preset.name for preset in list_methods(paradigm)]
    options: dict[str, str] = {}
    given = accelerator
    if isinstance(accelerator, str):
        name, options = parse_spec(accelerator)
        if name not in PRESETS:
            raise ValueError(f"unknown accelerator {short_repr(name)}; {suggest_names(name, names)}")
        accelerator = PRESETS[name]
    if not isinstance(accelerator, Method):
        raise TypeError(f"accelerator must be a preset's name or a method object, got {short_repr(accelerator)}")
    if accelerator.paradigm != paradigm:
        raise ValueError(
            f"accelerator {accelerator.name!r} is for {accelerator.paradigm} models, and this is a {paradigm} one: it runs "
            f"{', '.join(names)}"
        )
    if not options:
        return accelerator
    try:
        return replace(_change(accelerator, options), name=str(given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"accelerator {short_repr(given)}: {error}") from error


def list_settings(method: Any) -> dict[str, tuple[str, str]]:
    """Return what a method string may set: for each key, the part of the method and its field."""
    found: dict[str, tuple[str, str]] = {}
    for name, part in _parts(method).items():
        end = f".{name}" if isinstance(method, ScaleSchedule) else ""
        for each in fields(part) if is_dataclass(part) else ():
            if each.init and each.name not in (*NAMING, "stages", "policy"):
                found.setdefault(each.name + end, (name, each.name))
    return found


def _parts(method: Any) -> dict[str, Any]:
    """Return the parts of a method that have settings; the method itself is named `itself`."""
    if isinstance(method, ScaleSchedule):
        return {str(number): stage for number, stage in enumerate(method.stages, 1)}
    if isinstance(method, Accelerator):
        return {"drafter": method.drafter, "acceptance": method.acceptance}
    return {"policy": method.policy, "itself": method}


def _change(method: Any, options: Mapping[str, str]) -> Any:
    """Return the method with other settings."""
    rule = "acceptance"
    if isinstance(method, Accelerator) and rule in options:
        method = replace(method, acceptance=resolve_name(rule, options[rule], RULES))
        options = {key: text for key, text in options.items() if key != rule}
    parts, known = _parts(method), list_settings(method)
    changes: dict[str, dict[str, Any]] = {}
    for key, text in options.items():
        if key not in known:
            names = sorted([*known, *([rule] if isinstance(method, Accelerator) else [])])
            hint = f"{suggest_names(key, names)}; it has {', '.join(names)}" if names else "it has none"
            raise ValueError(f"method {method.name} has no setting {short_repr(key)}; {hint}")
        part, field = known[key]
        changes.setdefault(part, {})[field] = _parse_value(text, getattr(parts[part], field))
    for part, values in changes.items():  # all settings of a part at once: some are valid only in combination
        try:
            parts[part] = replace(parts[part], **values)
        except (ValueError, TypeError) as error:
            named = any(field in str(error) for field in values)
            raise ValueError(str(error) if named else f"{', '.join(values)}: {error}") from error
    if isinstance(method, ScaleSchedule):
        return replace(method, stages=tuple(parts.values()))
    return replace(parts.pop("itself", method), **parts)


def _parse_value(text: str, instead_of: Any) -> Any:
    """Parse a keyword, a number, or a string; several of them joined by + if the previous value was a tuple."""
    if isinstance(instead_of, tuple):
        return () if text.lower() == "none" else tuple(_parse_value(part, None) for part in text.split("+"))
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
