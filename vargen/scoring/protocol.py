"""The scorer interface: images and their prompts in, one number per image out.

All scores pass through `score_images` or `BatchedScorer`: a NaN, a missing score or prompt is an error, and never in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.files import expand_user
from vargen.reading import on_white
from vargen.values import require_int, short_repr

Images: TypeAlias = "Sequence[Image.Image] | Tensor"


@runtime_checkable
class Scorer(Protocol):
    """Any object with these three members.

    Attributes:
        name: shown in tables; includes the model and its weights if several are in use.
        identity: optional; identifies network, weights and settings. Cached scores of equal identity are reused.
    """

    name: str
    higher_is_better: bool

    def score(self, images: Images, prompts: Sequence[str]) -> Tensor:
        """Return float32 `[N]` on the CPU for N images (PIL, or a float tensor `[N, 3, Y, X]` in [0, 1]) and N prompts."""


class BatchedScorer:
    """Base class of scorers by `score_batch`: splits into batches, and validates as `score_images`.

    Args:
        name: see `Scorer`. device: where its network runs. batch_size: maximum number of images per batch.
    """

    higher_is_better = True

    def __init__(self, name: str, device: torch.device | str = "cpu", batch_size: int = 32):
        self.name = name
        self.device, self.batch_size = torch.device(device), require_int("batch_size", batch_size, 1)

    def score(self, images: Images, prompts: Sequence[str]) -> Tensor:
        """Score images; arguments and result as of `Scorer.score`, errors as of `score_images`."""
        _validate_pairs(images, prompts)
        parts = []
        with torch.inference_mode():
            for start in range(0, len(prompts), self.batch_size):
                chosen = slice(start, start + self.batch_size)
                scores = self.score_batch(images[chosen], prompts[chosen])
                parts.append(_validate_scores(scores, len(prompts[chosen]), self.name))
        return torch.cat(parts)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        """Return `[B]` scores for at most `batch_size` images and prompts, already validated."""
        raise NotImplementedError


@dataclass
class FunctionScorer:
    """Wraps a function of images and prompts as a scorer; it may return a tensor, an array or a list."""

    function: Callable[..., Any]
    name: str = ""
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        self.name = self.name or getattr(self.function, "__name__", type(self.function).__name__)

    def score(self, images: Images, prompts: Sequence[str]) -> Tensor:
        return score_images(self.function, images, prompts, self.name)


class NonFiniteScoreError(ValueError):
    """Raised if a scorer returns NaN or infinity."""


def to_scorer(value: Any, name: str = "") -> Scorer:
    """Return a scorer as it is, and a function `f(images, prompts)` wrapped as one."""
    is_class = isinstance(value, type)
    if isinstance(value, Scorer) and not is_class:
        return value
    if callable(value) and not is_class:
        return FunctionScorer(value, name)
    hint = ": call the class first" if is_class else ""
    raise TypeError(f"scorer must be a scorer or a function of images and prompts, got {short_repr(value)}{hint}")


def score_images(scorer: Scorer | Callable[..., Any], images: Images, prompts: Sequence[str], name: str = "") -> Tensor:
    """Return the scores of `scorer` as finite float32 `[N]` on the CPU.

    Raises:
        ValueError, TypeError: images or prompts are invalid, or the result is not one number per image.
        NonFiniteScoreError: a score is NaN or infinite; names the scorer and the first such image.
    """
    _validate_pairs(images, prompts)
    call = scorer.score if isinstance(scorer, Scorer) else scorer
    return _validate_scores(call(images, prompts), len(prompts), name or getattr(scorer, "name", "the scorer"))


def _validate_pairs(images: Any, prompts: Any) -> None:
    """Raise TypeError or ValueError unless there is at least one image, and one prompt for each."""
    if isinstance(images, Tensor):
        if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
            got = f"{str(images.dtype)[6:]} {list(images.shape)}"
            raise ValueError(f"images must be a float tensor [N, 3, Y, X] in [0, 1], got {got}")
        if not images.isfinite().all():
            raise ValueError("images must hold finite values, from 0 to 1")
    elif not isinstance(images, list | tuple) or not all(isinstance(image, Image.Image) for image in images):
        raise TypeError(f"images must be a list of PIL images or a float tensor [N, 3, Y, X], got {short_repr(images)}")
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(f"prompts must be a list of strings, one for each image, got {short_repr(prompts)}")
    if not len(images) or len(images) != len(prompts):
        raise ValueError(f"prompts must be one for each image, got {len(prompts)} for {len(images)}")


def _validate_scores(values: Any, count: int, name: str) -> Tensor:
    """Return `values` as finite float32 `[count]` on the CPU; raises as `score_images` does."""
    try:
        scores = torch.as_tensor(values).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"scorer {name} must give numbers, one for each image, got {short_repr(values)}") from error
    if scores.numel() != count or scores.dim() > 2:
        raise ValueError(f"scorer {name} must give [{count}], one for each image, got a shape of {list(scores.shape)}")
    scores = scores.reshape(count)
    if not scores.isfinite().all():
        first = int((~scores.isfinite()).nonzero()[0])
        found = f"{float(scores[first])} for image {first} of {count}"
        raise NonFiniteScoreError(f"scorer {name} gave {found}; its weights or the image are damaged")
    return scores


def to_pil(images: Images) -> list[Image.Image]:
    """Convert images in either form to RGB PIL images."""
    if not isinstance(images, Tensor):
        return [on_white(image) for image in images]
    values = (images.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(value) for value in values]


def to_tensor(images: Images) -> Tensor:
    """Convert images in either form to float32 `[N, 3, Y, X]` in [0, 1]."""
    if isinstance(images, Tensor):
        return images.float().clamp(0, 1)
    upright = to_pil(images)
    sizes = {image.size for image in upright}
    if len(sizes) > 1:
        raise ValueError(f"images must be of one size to be scored together, got {sorted(sizes)[:4]}")
    arrays = np.stack([np.asarray(image) for image in upright])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 255


def require_local_file(path: Any, argument: str, what: str, how: str) -> Path:
    """Return `path` if it exists; else FileNotFoundError names the `argument`, and how to get it."""
    found = None if path is None else expand_user(path, argument)
    if found is None or not found.exists():
        missing = "is not given" if found is None else f"{str(path)!r} does not exist"
        raise FileNotFoundError(f"{argument} {missing}, and {what} needs it: {how}")
    return found
