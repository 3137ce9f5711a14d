"""Feature extractors: networks whose features the distances compare. Each has an identity that includes its weights.

Features of different extractors cannot be compared, so every file of features or statistics records the identity.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.compat import import_torch_fidelity
from vargen.files import expand_user
from vargen.reading import on_white
from vargen.scoring.image_text import load_image_tower, packaged_scorers, preprocess, scorer_folder
from vargen.specs import import_object, parse_spec
from vargen.values import short_repr
from vargen.weight_files import load_pickle_safely, read_header, weights_digest

WEIGHTS_HINT = (
    "fetch weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases (95 MB), or the same weights as safetensors, "
    "and give weights=FILE"
)


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
        """Return features on the CPU."""
        if pixels_NCYX.dtype != torch.uint8 or pixels_NCYX.dim() != 4 or pixels_NCYX.shape[1] != 3:
            raise TypeError(f"images must be uint8 [N, 3, Y, X], got {str(pixels_NCYX.dtype)[6:]} {list(pixels_NCYX.shape)}")
        output = self.network(pixels_NCYX.to(self.device))
        pooled, logits = output if isinstance(output, tuple) else (output, None)
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


def load_fid_inception(path: str | Path | None) -> nn.Module:
    """Load the Inception-v3 of 2015-12-05 that defines FID, as torch-fidelity has it; it returns features and class scores.

    Args:
        path: local file of its weights, `.safetensors` or `.pth`, of which only tensors are read.
    """
    file = None if path is None else expand_user(path, "weights")
    if file is None or not file.is_file():
        missing = "weights are not given" if file is None else f"weights {str(path)!r} do not exist"
        raise FileNotFoundError(f"{missing}, and FID's Inception needs them: {WEIGHTS_HINT}")
    if file.suffix.lower() == ".safetensors":
        read_header(file)
        state = load_file(file)
    else:
        state = load_pickle_safely(file, advice=WEIGHTS_HINT)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} must hold a state dict, names and tensors; {WEIGHTS_HINT}")
    counters = {name.replace("running_mean", "num_batches_tracked") for name in state if name.endswith("running_mean")}
    state |= dict.fromkeys(counters, torch.tensor(0))  # older files lack them
    # torch-fidelity unpickles whatever it is given, so it gets bytes that were written here.
    safe = io.BytesIO()
    torch.save(state, safe)
    safe.seek(0)
    network = import_torch_fidelity("feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    try:
        return network("inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=safe)
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:])[:300]
        raise ValueError(f"the weights in {file} do not fit FID's Inception ({reason}); {WEIGHTS_HINT}") from None


def _inception(weights: str | None = None, device: torch.device | str = "cpu") -> Extractor:
    network = load_fid_inception(weights).to(device)
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


def _scorer_tower(source: str, device: torch.device | str = "cpu") -> Extractor:
    model, identity = load_image_tower(scorer_folder(source))
    model = model.to(device)

    def run(pixels: Tensor) -> Tensor:
        return model.pool_features(preprocess(model, pixels.float() / 255))

    name = source if source in packaged_scorers() else Path(source).resolve().name
    return Extractor(name, identity, run, device)


INCEPTION = "inception-2015-12-05"
EXTRACTORS: dict[str, Callable[..., Extractor]] = {"inception": _inception, "clip": _clip}


def load_extractor(spec: str, device: torch.device | str = "cpu") -> Extractor:
    """Open `inception:weights=FILE`, `clip:model=NAME,weights=FILE`, a packaged scorer or its folder, or `module:function`.

    The function returns an `nn.Module` of images in [0, 1].
    """
    where, colon, rest = spec.partition(":")
    if colon and "=" not in rest and where not in EXTRACTORS:
        return _import_extractor(spec, device)
    name, options = parse_spec(spec)
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
    return _scorer_tower(name, device=device)


def _import_extractor(spec: str, device: torch.device | str) -> Extractor:
    function = import_object(spec, "extractor")
    if not callable(function):
        raise ValueError(f"extractor {short_repr(spec)} must be a function or a class, got {short_repr(function)}")
    made = function()
    if isinstance(made, Extractor):
        return made
    if not isinstance(made, nn.Module):
        raise TypeError(f"extractor {spec} must return an nn.Module or an Extractor, got {short_repr(made)}")
    return module_extractor(made, spec, device)


def to_uint8_array(image: Image.Image, resize: int | None = None) -> np.ndarray:
    """Return uint8 `[Y, X, 3]`; if `resize` is given, the central square is cropped and scaled to that side (bicubic)."""
    image = on_white(image)
    if resize is not None and image.size != (resize, resize):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side)).resize((resize, resize), Image.Resampling.BICUBIC)
    return np.asarray(image)


def stack_images(images: Sequence[np.ndarray] | np.ndarray) -> Tensor:
    """Stack images `[Y, X, 3]` to uint8 `[N, 3, Y, X]`. Raises ValueError if they differ in size."""
    sizes = {image.shape for image in images}
    if len(sizes) != 1:
        listed = ", ".join(f"{shape[1]} x {shape[0]}" for shape in sorted(sizes)[:4])
        raise ValueError(f"images must be of one size, got {listed}; --resize makes them so")
    return torch.from_numpy(np.stack(list(images))).permute(0, 3, 1, 2)
