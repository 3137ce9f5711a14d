"""What an evaluation generates: indices, each with a prompt or class and a seed that depend only on the index."""

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
    """Indices 0 to `count` - 1: index i has the prompt or class i modulo their number, and the seed `seed` + i.

    Image i is thus the one that `vargen generate` returns for its prompt and seed, and a longer run contains a shorter one.

    Raises:
        ValueError: `count` is below 1, there are no prompts or classes, or a seed does not fit in 63 bits.
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
        """Return a digest that changes with any prompt or class and with the seed, but not with the count."""
        text = "\n".join(map(repr, [self.seed, *self.subjects]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def class_subjects(chosen: str, classes: int, names: dict[int, str], seed: int = 0, count: int = 0) -> list[Subject]:
    """Select the classes of an evaluation.

    Args:
        chosen: `each` (all classes in turn, equally often), `random` (uniformly sampled, as in published LlamaGen samples), or
            a comma-separated list of numbers and names.
        count: number of classes sampled for `random`; the class of index i depends only on the seed and i.

    Raises:
        ValueError: the model does not have a class.
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
    return int.from_bytes(digest[:8], "big") % below  # 2^64 values: modulo bias below 1e-16


def prompt_subjects(prompts: Any) -> list[Subject]:
    """Validate prompts as a pipeline call does."""
    return list(check_prompts(prompts, "prompts"))
