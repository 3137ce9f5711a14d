"""What an evaluation draws: items, each a prompt or a class and a seed that depends on nothing but the item."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vargen.pipelines.validation import MAX_SEED, check_class_labels, check_prompts
from vargen.values import parse_int, short_repr

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
        if parse_int(self.count, 1) is None:
            raise ValueError(f"num must be a whole number of at least 1, got {short_repr(self.count)}")
        if not self.subjects:
            raise ValueError("an evaluation needs at least one prompt or class")
        if parse_int(self.seed, 0, MAX_SEED - self.count + 1) is None:
            most = MAX_SEED - self.count + 1
            raise ValueError(f"seed must be from 0 to {most} for {self.count} pictures, got {short_repr(self.seed)}")

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
