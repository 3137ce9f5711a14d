"""Validation of a call's arguments. Errors name the argument, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any
from unicodedata import category

import numpy as np
from torch import Tensor

from vargen.decoding import Sampling
from vargen.models.guidance import Guidance
from vargen.values import MAX_SEED, require_int, short_repr

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
MAX_IMAGES = 1024  # per call; a larger number is a typo or a job for a batch script


def validate_prompts(prompt: Any, name: str = "prompt") -> list[str]:
    """Return the prompts as a list."""
    if prompt is None:
        raise ValueError(f"give a {name}, for example 'a red apple'")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple):
        raise TypeError(f"{name} must be a string or a list of strings, got {type(prompt).__name__}")
    if not prompts:
        raise ValueError(f"{name} is an empty list; give at least one prompt")
    for i, text in enumerate(prompts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] must be a string, got {type(text).__name__}: {short_repr(text)}")
        # Visible is what is no whitespace, control, formatting or combining character.
        if not any(not char.isspace() and (char.isascii() or category(char) not in ("Cf", "Cc", "Mn")) for char in text):
            raise ValueError(f"{name}[{i}] is empty; describe an image, for example 'a red apple'")
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # undecodable bytes from a shell
            raise ValueError(f"{name}[{i}] must be valid Unicode that UTF-8 can hold, got {short_repr(text)}")
    return list(prompts)


def is_blank(prompt: Any) -> bool:
    """Whether a negative prompt, or each of a list, is None or has only whitespace."""
    prompts = prompt if isinstance(prompt, list | tuple) else [prompt]
    return all(each is None or (isinstance(each, str) and not each.strip()) for each in prompts)


def validate_sampling(settings: Mapping[str, Any]) -> tuple[float, Sampling]:
    """Split the settings into the guidance scale (default 1) and a `Sampling` of the others."""
    others = {name: value for name, value in settings.items() if name != "guidance_scale"}
    return Guidance(settings.get("guidance_scale", 1.0)).scale, Sampling(**others)


def resolve_class_labels(class_labels: Any, num_classes: int, id2label: dict[int, str] | None = None) -> list[int]:
    """Return the class numbers as a list; names are looked up in `id2label`."""
    if isinstance(class_labels, Tensor | np.ndarray):
        class_labels = class_labels.flatten().tolist()
    labels = [class_labels] if isinstance(class_labels, Integral | str) else class_labels
    listed = labels if isinstance(labels, Sequence) else []
    if not listed or not all(isinstance(each, Integral | str) and not isinstance(each, bool) for each in listed):
        raise TypeError(f"class_labels must be a class number or name, or a list of them, got {short_repr(class_labels)}")
    names = {name.strip().lower(): number for number, names in (id2label or {}).items() for name in names.split(",")}
    numbers = []
    for label in listed:
        number = names.get(label.strip().lower()) if isinstance(label, str) else label
        if number is None:
            near = difflib.get_close_matches(str(label).lower(), names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "give the class number"
            raise ValueError(f"unknown class name {short_repr(label)}; {hint}")
        numbers.append(require_int("class label", number, 0, num_classes - 1))
    return numbers


def validate_num_images(num_images_per_prompt: Any, prompts: int, candidates: int = 1) -> int:
    """Return the count; ValueError if it is below 1 or the call has over `MAX_IMAGES` images."""
    count = require_int("num_images_per_prompt", num_images_per_prompt, 1)
    if count * prompts * candidates > MAX_IMAGES:
        found = f"{prompts} x {short_repr(count)} x {candidates}"
        raise ValueError(f"one call generates at most {MAX_IMAGES} images (prompts x images x candidates), got {found}")
    return count


def wants_stop(answer: Any) -> bool:
    """Whether `callback_on_step_end` returned that the call should stop."""
    if answer is None:
        return False
    if not isinstance(answer, Mapping):
        raise TypeError(f"callback_on_step_end must return None or a dict such as {{'stop': True}}, got {short_repr(answer)}")
    return bool(answer.get("stop", False))


def validate_seed(seed: Any, images: int) -> int:
    """Return the seed of the first of `images` images, which have consecutive seeds."""
    number = require_int("seed", seed, 0, MAX_SEED)
    if number + images - 1 > MAX_SEED:
        raise ValueError(f"seed must be at most {MAX_SEED} for the last of {images} images, got {number} for the first")
    return number


def validate_batch_size(batch: Any, name: str = "batch") -> int:
    """Raise ValueError unless it is a whole number of images from 1 to `MAX_IMAGES`."""
    return require_int(name, batch, 1, MAX_IMAGES)
