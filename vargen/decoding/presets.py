"""The presets of all paradigms, and the parsing of method strings: a preset with optional settings, as in `gumbel:window=8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from vargen.decoding.experimental import EXPERIMENTAL_METHODS, EXPERIMENTAL_RULES
from vargen.decoding.method import Method
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.acceptance import RULES, FunctionRule
from vargen.decoding.next_token.presets import NEXT_TOKEN_METHODS
from vargen.decoding.schedule import NEXT_SCALE_METHODS, ScaleSchedule
from vargen.decoding.video.presets import VIDEO_METHODS
from vargen.specs import parse_spec
from vargen.values import resolve_name, short_repr, suggest_names

# Parts that a setting can select by name, keyed by the field that holds them.
_NAMED: dict[str, Mapping[str, Any]] = {"acceptance": {**RULES, **EXPERIMENTAL_RULES}}
_NO_SETTINGS = ("name", "stages", "summary", "source", "experimental", "policy")
_WORDS: Mapping[str, Any] = {"none": None, "true": True, "false": False}


_ALL: tuple[tuple[Method, ...], ...] = ((*NEXT_TOKEN_METHODS, *EXPERIMENTAL_METHODS), NEXT_SCALE_METHODS, VIDEO_METHODS)
# By name; of each paradigm the core methods first.
PRESETS: dict[str, Any] = {
    method.name: method for methods in _ALL for method in sorted(methods, key=lambda method: method.experimental)
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
        kinds = {Accelerator.paradigm: "an Accelerator", ScaleSchedule.paradigm: "a ScaleSchedule"}
        kind = kinds.get(paradigm, "a VideoMethod")
        raise TypeError(f"accelerator must be a preset's name or {kind}, got {short_repr(accelerator)}")
    if accelerator.paradigm != paradigm:
        raise ValueError(
            f"accelerator {accelerator.name!r} is for {accelerator.paradigm} models, and this is a {paradigm} one: it runs "
            f"{', '.join(names)}"
        )
    if not options:
        return accelerator
    try:
        return replace(_set(accelerator, options), name=str(given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"accelerator {short_repr(given)}: {error}") from error


def _set(method: Any, options: Mapping[str, str]) -> Any:
    """Return the method with other settings."""
    parts, whole = _parts(method, options)
    end = ".{}" if isinstance(method, ScaleSchedule) else ""
    allowed = {part: {field + end.format(part): field for field in _settable(value)} for part, value in parts.items()}
    changes: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, text in options.items():
        if key in whole:
            continue
        owner = next((part for part in parts if key in allowed[part]), None)
        if owner is None:
            names = sorted({*whole, *(key for each in allowed.values() for key in each)})
            known = f"{suggest_names(key, names)}; it has {', '.join(names)}" if names else "it has none"
            raise ValueError(f"method {method.name} has no setting {short_repr(key)}; {known}")
        field = allowed[owner][key]
        changes[owner][field] = _value(text, getattr(parts[owner], field))
    for part, values in changes.items():  # all settings of a part at once: some are valid only in combination
        try:
            parts[part] = replace(parts[part], **values) if values else parts[part]
        except (ValueError, TypeError) as error:
            named = any(field in str(error) for field in values)
            raise ValueError(str(error) if named else f"{', '.join(values)}: {error}") from error
    if isinstance(method, ScaleSchedule):
        return replace(method, stages=tuple(parts.values()))
    changed = parts.pop("", method)
    return replace(changed, **parts)


def _parts(method: Any, options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the parts that have settings, by name (the method itself under ""), and the names of those selected by name."""
    if isinstance(method, ScaleSchedule):
        return {str(number): stage for number, stage in enumerate(method.stages, 1)}, []
    own = ["drafter", "acceptance"] if isinstance(method, Accelerator) else ["policy"]
    named = [part for part in own if part in _NAMED]
    parts = {part: getattr(method, part) for part in own}
    parts |= {part: resolve_name(part, options[part], _NAMED[part]) for part in named if part in options}
    return parts if isinstance(method, Accelerator) else {**parts, "": method}, named


def _settable(part: Any) -> list[str]:
    if not is_dataclass(part) or isinstance(part, type | FunctionRule):
        return []
    return [field.name for field in fields(part) if field.init and field.name not in _NO_SETTINGS]


def _value(text: str, instead_of: Any) -> Any:
    """Parse a keyword, a number, or a string; several of them joined by + if the previous value was a tuple."""
    if isinstance(instead_of, tuple):
        return () if text.lower() == "none" else tuple(_value(part, None) for part in text.split("+"))
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
