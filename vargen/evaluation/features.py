"""Feature extractors: networks whose features the distances compare. Each has an identity that includes its weights.

Features of different extractors cannot be compared, so every file of features or statistics records the identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vargen.evaluation.inception import FIDInception
from vargen.reading import on_white
from vargen.scoring.packaged import open_tower, packaged_scorers, prepared, scorer_folder, tower_identity
from vargen.specs import of_ones_own, read_spec
from vargen.values import short_repr
from vargen.weight_files import weights_digest


class Features(NamedTuple):
    """Features float32 `[N, D]`, and class scores `[N, classes]` if the network has them, for the Inception Score."""

    pooled: Tensor
    logits: Tensor | None = None


class Extractor:
    """A network applied to uint8 images.

    Args:
        name: shown in tables. identity: identifies the network and its weights.
        network: maps uint8 `[N, 3, Y, X]` on `device` to features `[N, D]`, or to features and class scores.
        normalized: whether features are unit vectors, as CMMD requires.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        network: Callable[[Tensor], Any],
        device: torch.device | str = "cpu",
        normalized: bool = False,
    ):
        self.name, self.identity, self.network, self.normalized = name, identity, network, normalized
        self.device = torch.device(device)

    @torch.inference_mode()
    def __call__(self, pixels_NCYX: Tensor) -> Features:
        """Return features on the CPU.

        Raises:
            TypeError: the pixels are not uint8 `[N, 3, Y, X]`. ValueError: the features are not finite `[N, D]`.
        """
        if pixels_NCYX.dtype != torch.uint8 or pixels_NCYX.dim() != 4 or pixels_NCYX.shape[1] != 3:
            raise TypeError(f"pictures must be uint8 [N, 3, Y, X], got {str(pixels_NCYX.dtype)[6:]} {list(pixels_NCYX.shape)}")
        made = self.network(pixels_NCYX.to(self.device))
        pooled, logits = made if isinstance(made, tuple) else (made, None)
        if not isinstance(pooled, Tensor) or pooled.dim() != 2 or len(pooled) != len(pixels_NCYX):
            got = list(pooled.shape) if isinstance(pooled, Tensor) else type(pooled).__name__
            raise ValueError(f"extractor {self.name} must give features [{len(pixels_NCYX)}, D], got {got}")
        if not pooled.isfinite().all():
            raise ValueError(f"extractor {self.name} gave NaN or infinite features; its weights are damaged")
        return Features(pooled.float().cpu(), None if logits is None else logits.float().cpu())


def module_extractor(module: nn.Module, name: str, device: torch.device | str = "cpu", normalized: bool = False) -> Extractor:
    """Wrap a network of float images `[N, 3, Y, X]` in [0, 1] to features `[N, D]`; its weights define its identity."""
    network = module.to(device).eval().requires_grad_(False)
    digest = weights_digest(network)
    if not any(True for _ in network.parameters()):  # without weights, two such modules could not be distinguished
        digest = hashlib.sha256(repr(network).encode()).hexdigest()[:16]

    def run(pixels: Tensor) -> Tensor:
        return network(pixels.float() / 255)

    return Extractor(name, f"{name}-{digest}", run, device, normalized)


def _inception(weights: str | None = None, device: torch.device | str = "cpu") -> Extractor:
    network = FIDInception.from_file(weights).to(device)
    return Extractor("inception", f"{INCEPTION}-{weights_digest(network)}", network, device)


def _clip(
    model: str = "ViT-L-14-336", weights: str | None = "openai", device: torch.device | str = "cpu"
) -> Extractor:  # fmt: skip
    """CLIP features; by default those of CMMD (Jayasumana et al. 2024), unit vectors of CLIP ViT-L/14 at 336 pixels."""
    from vargen.scoring.clip import CLIPScorer

    scorer = CLIPScorer(model, weights, device=device)

    def run(pixels: Tensor) -> Tensor:
        return F.normalize(scorer.embed_images(pixels.float() / 255), dim=-1)

    return Extractor(scorer.name, f"open-clip-{model}-{weights_digest(scorer.clip)}", run, device, normalized=True)


def _tower(source: str, device: torch.device | str = "cpu") -> Extractor:
    model = open_tower(scorer_folder(source)).to(device)

    def run(pixels: Tensor) -> Tensor:
        return model.pooled(prepared(model, pixels.float() / 255))

    name = source if source in packaged_scorers() else Path(source).resolve().name
    return Extractor(name, tower_identity(model), run, device)


INCEPTION = "inception-2015-12-05"
EXTRACTORS: dict[str, Callable[..., Extractor]] = {"inception": _inception, "clip": _clip}


def open_extractor(spec: str, device: torch.device | str = "cpu") -> Extractor:
    """Open `inception:weights=FILE`, `clip:model=NAME,weights=FILE`, a packaged scorer or its folder, or `module:function`.

    The function returns an `nn.Module` of images in [0, 1].

    Raises:
        ValueError: for an unknown name or option. FileNotFoundError: weights are missing; the message says how to get them.
    """
    where, colon, rest = spec.partition(":")
    if colon and "=" not in rest and where not in EXTRACTORS:
        return _imported(spec, device)
    name, options = read_spec(spec)
    allowed = {"inception": ("weights",), "clip": ("model", "weights")}.get(name, ())
    if unknown := [key for key in options if key not in allowed]:
        raise ValueError(f"extractor {name} has no option {short_repr(unknown[0])}; it takes {', '.join(allowed) or 'none'}")
    if name in EXTRACTORS:
        return EXTRACTORS[name](**options, device=device)
    if name not in packaged_scorers() and not Path(name).expanduser().is_dir():
        known = [*EXTRACTORS, *packaged_scorers()]
        raise ValueError(
            f"unknown extractor {short_repr(name)}; known: {', '.join(known)}, a scorer's folder, or module:function"
        )
    return _tower(name, device=device)


def _imported(spec: str, device: torch.device | str) -> Extractor:
    function = of_ones_own(spec, "extractor")
    if not callable(function):
        raise ValueError(f"extractor {short_repr(spec)} must be a function or a class, got {short_repr(function)}")
    made = function()
    if isinstance(made, Extractor):
        return made
    if not isinstance(made, nn.Module):
        raise TypeError(f"extractor {spec} must return an nn.Module or an Extractor, got {short_repr(made)}")
    return module_extractor(made, spec, device)


def picture_array(image: Image.Image, resize: int | None = None) -> np.ndarray:
    """Return uint8 `[Y, X, 3]`; if `resize` is given, the central square is cropped and scaled to that side (bicubic)."""
    image = on_white(image)
    if resize is not None and image.size != (resize, resize):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side)).resize((resize, resize), Image.Resampling.BICUBIC)
    return np.asarray(image)


def extracted(extractor: Extractor, pictures: Sequence[np.ndarray] | np.ndarray, batch_size: int = 32) -> Features:
    """Return the features of uint8 images `[Y, X, 3]` of one size, computed in batches."""
    parts = [extractor(as_batch(pictures[start : start + batch_size])) for start in range(0, len(pictures), batch_size)]
    logits = [part.logits for part in parts if part.logits is not None]
    return Features(torch.cat([part.pooled for part in parts]), torch.cat(logits) if logits else None)


def as_batch(pictures: Sequence[np.ndarray] | np.ndarray) -> Tensor:
    """Stack images `[Y, X, 3]` to uint8 `[N, 3, Y, X]`. Raises ValueError if they differ in size."""
    sizes = {picture.shape for picture in pictures}
    if len(sizes) != 1:
        listed = ", ".join(f"{shape[1]} x {shape[0]}" for shape in sorted(sizes)[:4])
        raise ValueError(f"pictures must be of one size, got {listed}; --resize makes them so")
    return torch.from_numpy(np.stack(list(pictures))).permute(0, 3, 1, 2)


def chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
