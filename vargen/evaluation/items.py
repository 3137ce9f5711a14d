"""What an evaluation draws: items, each a prompt or a class and a seed that depends on nothing but the item."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from vargen.decoding import Method, Schedule, resolve_method
from vargen.decoding.next_token.acceptance import RULES
from vargen.pipelines.checks import LARGEST_SEED, check_class_labels, check_prompts
from vargen.scoring.registry import read_spec
from vargen.values import resolve_name, shown, suggest_names, whole

Subject = str | int  # a prompt, or a class


@dataclass(frozen=True)
class Items:
    """Items 0 to `count` - 1: item i has the subject i modulo their number, and the seed `seed` + i.

    Picture i is thus what `vargen generate` draws of its subject with that seed, and a run of more items has those of fewer.

    Raises:
        ValueError: for a count below 1, no subjects, or seeds that do not fit 63 bits.
    """

    subjects: Sequence[Subject]
    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if whole(self.count, 1) is None:
            raise ValueError(f"num must be a whole number of at least 1, got {shown(self.count)}")
        if not self.subjects:
            raise ValueError("an evaluation needs at least one prompt or class")
        if whole(self.seed, 0, LARGEST_SEED - self.count + 1) is None:
            most = LARGEST_SEED - self.count + 1
            raise ValueError(f"seed must be from 0 to {most} for {self.count} pictures, got {shown(self.seed)}")

    def subject(self, item: int) -> Subject:
        return self.subjects[item % len(self.subjects)]

    def digest(self) -> str:
        """Changes with any subject and with the seed, not with the count."""
        text = "\n".join(map(repr, [self.seed, *self.subjects]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def class_subjects(chosen: str, classes: int, names: dict[int, str], seed: int = 0, count: int = 0) -> list[Subject]:
    """Classes to draw.

    Args:
        chosen: `each` (all in turn: as many of each), `random` (drawn uniformly, as published samples of LlamaGen are), or a
            comma-separated list of numbers and names.
        count: how many are drawn for `random`; the class of item i depends on the seed and i alone.

    Raises:
        ValueError: for a class that the model has not.
    """
    if chosen == "each":
        return list(range(classes))
    if chosen == "random":
        return [_uniform(seed, item, classes) for item in range(max(count, 1))]
    given = [part.strip() for part in chosen.split(",")]
    labels = [int(part) if part.lstrip("-").isdecimal() and len(part) < 1000 else part for part in given]
    return list(check_class_labels(labels, classes, names))


def _uniform(seed: int, item: int, below: int) -> int:
    digest = hashlib.sha256(f"class {seed} {item}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % below  # 2^64 values: no class is favoured by more than 1e-16


def prompt_subjects(prompts: Any) -> list[Subject]:
    """Prompts, checked as a call checks them."""
    return list(check_prompts(prompts, "prompts"))


def method_of(spec: str, family: str) -> Method:
    """A preset of the family, with other settings where `spec` gives some: of its drafter and rule, `gsd:budget=5,window=24`,
    or of the stages of a schedule by their numbers, `code:until.1=-3`. `acceptance` is another rule of the preset's drafts, by
    its name in `RULES`: `scd:acceptance=ratio,ratio=2,budget=5`.

    Raises:
        ValueError: for an unknown preset, rule or setting, or a value that the part refuses.
    """
    name, options = read_spec(spec)
    accelerator = resolve_method(name, family)
    if isinstance(accelerator, Schedule):
        parts: dict[str, Any] = {f".{number}": stage for number, stage in enumerate(accelerator.stages, 1)}
        allowed = {part: [each + part for each in _settable(stage) if each != "rule"] for part, stage in parts.items()}
    else:
        rule = options.pop("acceptance", None)
        acceptance = accelerator.acceptance if rule is None else resolve_name("acceptance", rule, RULES)
        parts = {"drafter": accelerator.drafter, "acceptance": acceptance}
        allowed = {part: _settable(value) for part, value in parts.items()}
    changes: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for key, text in options.items():
        owner = next((part for part in parts if key in allowed[part]), None)
        if owner is None:
            names = sorted({name for each in allowed.values() for name in each})
            known = suggest_names(key, names) if names else "it has none"
            raise ValueError(f"method {name} has no setting {shown(key)}; {known}")
        changes[owner][key.removesuffix(owner)] = _value(text)
    for part, values in changes.items():  # all of a part at once: some are right only together
        parts[part] = replace(parts[part], **values) if values else parts[part]
    if isinstance(accelerator, Schedule):
        return replace(accelerator, stages=tuple(parts.values()))
    return replace(accelerator, **parts) if options or rule is not None else accelerator


def _settable(part: Any) -> list[str]:
    if not is_dataclass(part) or isinstance(part, type):
        return []
    return [field.name for field in fields(part) if field.init and field.name not in ("function", "name")]


def _value(text: str) -> Any:
    words: Mapping[str, Any] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
