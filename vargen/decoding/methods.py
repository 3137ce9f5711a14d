"""Methods as data: what those of all paradigms have in common, method strings such as `gumbel:window=8`, next-token presets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

from vargen.decoding.interfaces import AcceptanceRule, Drafter, TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.relaxed_rules import GroupedRule, NeighborhoodRule, PooledRule
from vargen.decoding.rules import shared_noise, speculative_sampling
from vargen.decoding.speculative import Sequential, Speculative
from vargen.decoding.tree_drafters import DynamicTree, Eagle, Medusa
from vargen.decoding.tree_rules import traversal
from vargen.specs import init_fields, parse_spec, part_name
from vargen.values import resolve_name, short_repr, suggest_names

DEFAULT_METHOD = "auto"  # default of pipelines, demo, and command line
NAMING = ("name", "summary", "source", "experimental")  # fields that have no effect on the output


@dataclass(frozen=True)
class Method(ABC):
    """A named generation method: an `Accelerator`, a `ScaleSchedule`, or a `VideoMethod`.

    Attributes:
        name: used in statistics and messages.
        summary: one-line description for users.
        source: paper.
        experimental: whether listings place it after the core methods.
        paradigm: of the models that can run it.
        named_parts: for each field that a method string may replace by a name, the parts by name.
    """

    name: str = "custom"
    summary: str = field(default="", kw_only=True)
    source: str = field(default="", kw_only=True)
    experimental: bool = field(default=False, kw_only=True)
    paradigm: ClassVar[Literal["next-token", "next-scale", "video"]]
    named_parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    @abstractmethod
    def kind(self) -> Literal["exact", "relaxed"]:
        """`"exact"` if the output follows the target model's own distribution, otherwise `"relaxed"`."""

    @property
    def sequential_tokens(self) -> bool:
        """Whether it commits the tokens that the sequential baseline selects with the same noise, rounding errors aside."""
        return False

    @property
    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """The dataclasses whose fields a method string may set: fields of the method by name, or `"itself"`."""

    def with_parts(self, parts: dict[str, Any]) -> Method:
        """Return the method with other parts; see `parts`."""
        fields = {name: part for name, part in parts.items() if name != "itself"}
        return replace(parts.get("itself", self), **fields)

    @property
    def settings(self) -> dict[str, Any]:
        """What a method string may set, as it is now, except for None; nested dataclasses are given as their repr."""
        values = {key: getattr(self.parts[part], name) for key, (part, name) in list_settings(self).items()}
        return {key: repr(each) if is_dataclass(each) else each for key, each in values.items() if each is not None}

    def spec(self) -> dict[str, Any]:
        """Everything that determines the output, as plain values. Methods with equal specs generate identical output.

        Raises:
            ValueError: if a part has no name, such as a lambda.
        """
        return {name: value for name, value in init_fields(self).items() if name not in NAMING}


PRESETS: dict[str, Any] = {}


def register_presets(*methods: Method) -> None:
    """Add presets, which pipelines, commands and pages then have by name."""
    PRESETS.update({method.name: method for method in methods})


def list_methods(paradigm: str) -> list[Any]:
    """The presets for models of a paradigm, such as `"next-token"`; core methods first."""
    found = (preset for preset in PRESETS.values() if preset.paradigm == paradigm)
    return sorted(found, key=lambda preset: preset.experimental)


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
        name, options = (accelerator, {}) if accelerator in PRESETS else parse_spec(accelerator)
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


def list_settings(method: Method) -> dict[str, tuple[str, str]]:
    """Return what a method string may set: for each key, the part of the method and its field."""
    found: dict[str, tuple[str, str]] = {}
    for name, part in method.parts.items():
        end = f".{name}" if name.isdigit() else ""
        for each in fields(part) if is_dataclass(part) else ():
            if each.init and each.name not in (*NAMING, *method.parts):
                found.setdefault(each.name + end, (name, each.name))
    return found


def _change(method: Any, options: Mapping[str, str]) -> Any:
    """Return the method with other settings."""
    options = dict(options)
    for name, named in method.named_parts.items():
        if name in options:
            method = replace(method, **{name: resolve_name(name, options.pop(name), named)})
    parts, known = method.parts, list_settings(method)
    changes: dict[str, dict[str, Any]] = {}
    for key, text in options.items():
        if key not in known:
            names = sorted([*known, *method.named_parts])
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
    return method.with_parts(parts)


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


# -- next-token models ---------------------------------------------------------------------------------------------------

# Rules by the name that the setting `acceptance` selects.
RULES: dict[str, AcceptanceRule] = {
    "speculative-sampling": speculative_sampling,
    "shared-noise": shared_noise,
    "traversal": traversal,
    "grouped": GroupedRule(),
    "neighborhood": NeighborhoodRule(),
    "pooled": PooledRule(),
}
_REQUIREMENT_MESSAGES = {
    "independent-per-pass": "it needs draft tokens that are sampled again in every pass, each with its own uniforms",
    "with-replacement": "it needs siblings that are sampled with replacement, and whose number does not depend on the samples",
}


@dataclass(frozen=True)
class Accelerator(Method):
    """A method for next-token models: a drafter and an acceptance rule.

    Attributes:
        drafter: proposes draft tokens. Default: none are proposed, and each pass commits one token.
        acceptance: the rule that verifies the draft.

    Raises:
        TypeError: if `drafter` is not a drafter or `acceptance` is not a rule.
        ValueError: if the parts are incompatible; says why.
    """

    drafter: Drafter = field(default_factory=Sequential)
    acceptance: AcceptanceRule = shared_noise
    paradigm: ClassVar[Literal["next-token"]] = "next-token"
    named_parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {"acceptance": RULES}

    def __post_init__(self) -> None:
        rule, drafter = self.acceptance, self.drafter
        if not isinstance(rule, AcceptanceRule):
            raise TypeError(f"acceptance must be a rule, such as shared_noise or GroupedRule(), got {short_repr(rule)}")
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafter must be a Drafter, such as Jacobi() or Speculative(), got {short_repr(drafter)}")
        parts = f"acceptance {part_name(rule)} cannot be combined with {type(drafter).__name__}"
        if drafter.topology not in rule.topologies:
            raise ValueError(
                f"{parts}: it verifies a {rule.topologies[0]} and would test each sibling against the full target "
                "distribution; shared_noise, recursive_rejection, k_seq and traversal verify trees"
            )
        for requirement in rule.requires:
            needed = requirement != "with-replacement" or drafter.topology == "tree"  # a chain has no siblings
            if needed and requirement not in drafter.provides:
                raise ValueError(f"{parts}: {_REQUIREMENT_MESSAGES[requirement]}")

    @property
    def kind(self) -> Literal["exact", "relaxed"]:
        return "exact" if self.acceptance.exact else "relaxed"

    @property
    def sequential_tokens(self) -> bool:
        return self.acceptance.sequential_tokens

    @property
    def parts(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "acceptance": self.acceptance}

    def bind(self, model: TokenModel, slots: int = 0) -> tuple[Drafter, AcceptanceRule]:
        """Return the drafter, with buffers for B slots, and the rule for a model.

        Raises:
            ValueError: if this model cannot run the method; says why.
        """
        return self.drafter.bind(model, slots), self.acceptance.bind(model)


register_presets(
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
