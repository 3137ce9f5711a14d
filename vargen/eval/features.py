"""Feature extractors: networks whose features the distances compare. Each has an identity that includes its weights.

Features of different extractors cannot be compared, so every file of features or statistics records the identity.

The evaluation suite of ADM (Dhariwal and Nichol 2021) stores reference statistics as `.npz` with `mu` and `sigma`, and batches
of samples as `.npz` with `arr_0`, uint8 `[N, Y, X, 3]`. Both can be read and written here. Our files also record the extractor
and the number of images, in additional arrays that other programs ignore.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.compat import import_torch_fidelity
from vargen.files import atomic_file, expand_user
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


# -- statistics, in the file formats of the field --------------------------------------------------------------------------


_SAMPLES = "arr_0.npy"
_INCEPTION, DIMENSIONS = "inception", 2048  # FID's network, and its features
_OWN = ("vargen_extractor", "vargen_count", "vargen_size", "vargen_features")


@dataclass
class FeatureStatistics:
    """Statistics of features: mean float64 `[D]`, covariance float64 `[D, D]` with divisor N - 1.

    Attributes:
        count: N; None if a file does not record it.
        extractor: its identity; None likewise.
        size: (Y, X) of the images; None likewise.
        features: float32 `[N, D]` if they are kept, for KID, precision and recall.
    """

    mean: Tensor
    covariance: Tensor
    count: int | None = None
    extractor: str | None = None
    size: tuple[int, int] | None = None
    features: Tensor | None = None

    @property
    def dimensions(self) -> int:
        return len(self.mean)

    @classmethod
    def from_features(
        cls, features: Tensor, extractor: str | None = None, size: tuple[int, int] | None = None, keep: bool = True
    ) -> FeatureStatistics:  # fmt: skip
        """Compute the statistics of features `[N, D]`, N at least 2; stores the features themselves if `keep`."""
        if features.dim() != 2 or len(features) < 2:
            raise ValueError(f"features must be [N, D] of at least two images, got {list(features.shape)}")
        exact = features.double()
        mean = exact.mean(0)
        centered = exact - mean
        covariance = centered.T @ centered / (len(exact) - 1)
        return cls(mean, covariance, len(features), extractor, size, features.float() if keep else None)

    def subsample_features(self, max_features: int, seed: int = 0) -> FeatureStatistics:
        """Return the same statistics with at most `max_features` features, chosen at random; with 0, none."""
        if self.features is None or len(self.features) <= max_features:
            return self
        chosen = torch.randperm(len(self.features), generator=torch.Generator().manual_seed(seed))[:max_features]
        return replace(self, features=self.features[chosen.sort().values] if max_features else None)

    def validate_extractor(self, identity: str, name: str, what: str = "reference") -> None:
        """Raise ValueError unless these statistics may be compared with features of the extractor `identity`."""
        if self.extractor is not None and self.extractor != identity:
            raise ValueError(
                f"{what} holds statistics of the extractor {self.extractor}, and images are measured by {identity}: "
                "a distance between them would be meaningless; compute the statistics again, or choose that extractor"
            )
        if self.extractor is None and (not identity.startswith(_INCEPTION) or self.dimensions != DIMENSIONS):
            raise ValueError(
                f"{what} does not name its extractor, so it is assumed to be FID's Inception of {DIMENSIONS} dimensions; it "
                f"has {self.dimensions} dimensions, and images are measured by {name}"
            )

    def validate_size(self, size: tuple[int, int], what: str = "reference") -> None:
        """Raise ValueError if these statistics are of images of another size than `size`, (Y, X)."""
        if self.size is not None and self.size != tuple(size):
            raise ValueError(
                f"{what} is of images of {self.size[1]} x {self.size[0]}, and these are {size[1]} x {size[0]}; resizing "
                "changes every distance, so it must be requested for both by --resize"
            )

    def write(self, path: Path, compact: bool = False) -> None:
        """Write `.npz`, with features if there are any. `compact` rounds the statistics to float32, and features to float16."""
        exact, short = (np.float32, np.float16) if compact else (np.float64, np.float32)
        arrays: dict[str, Any] = {"mu": self.mean.numpy().astype(exact), "sigma": self.covariance.numpy().astype(exact)}
        if self.extractor is not None:
            arrays["vargen_extractor"] = np.array(self.extractor)
        if self.count is not None:
            arrays["vargen_count"] = np.array(self.count)
        if self.size is not None:
            arrays["vargen_size"] = np.array(self.size)
        if self.features is not None:
            arrays["vargen_features"] = self.features.numpy().astype(short)
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def read(cls, path: str | Path) -> FeatureStatistics:
        """Read our own file format, or ADM's."""
        file = expand_user(path, "reference")
        held = _read_arrays(file, "mu", "sigma", *_OWN)
        if "mu" not in held or "sigma" not in held:
            raise ValueError(f"{file} must hold mu and sigma, as reference statistics do")
        try:
            mean, covariance = (torch.from_numpy(np.array(held[name], dtype=np.float64)) for name in ("mu", "sigma"))
            count = int(held["vargen_count"]) if "vargen_count" in held else None
            extractor = str(held["vargen_extractor"]) if "vargen_extractor" in held else None
            size = tuple(int(side) for side in held["vargen_size"]) if "vargen_size" in held else None
            features = torch.from_numpy(held["vargen_features"].astype(np.float32)) if "vargen_features" in held else None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if mean.dim() != 1 or tuple(covariance.shape) != (len(mean), len(mean)):
            raise ValueError(f"{file} holds mu {list(mean.shape)} and sigma {list(covariance.shape)}, expected [D] and [D, D]")
        if not all(part is None or part.isfinite().all() for part in (mean, covariance, features)):
            raise ValueError(f"{file} holds NaN or infinite values")
        return cls(mean, covariance, count, extractor, size, features)  # type: ignore[arg-type]


def _read_arrays(file: Path, *names: str) -> dict[str, np.ndarray]:
    """Return those of the named arrays that a `.npz` file holds."""
    if not file.is_file():
        raise FileNotFoundError(f"{str(file)!r} does not exist")
    try:
        with zipfile.ZipFile(file):  # otherwise numpy would try other formats
            pass
        with np.load(file, allow_pickle=False) as held:
            return {name: held[name] for name in names if name in held}
    except MemoryError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise many types; numpy's message recommends unpickling
        reason = "pickled data, which is not opened" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
    raise ValueError(f"{file} is damaged or not a .npz file ({reason})")


# -- batches of samples --------------------------------------------------------------------------------------------------


def write_adm_samples(path: Path, images: Iterable[np.ndarray], count: int, size: tuple[int, int]) -> None:
    """Write `.npz` with `arr_0`, uint8 `[count, Y, X, 3]`, one image at a time: 50,000 of 256 pixels do not fit in memory."""
    shape = (count, *size, 3)
    with atomic_file(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open(_SAMPLES, "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            written = 0
            for image in images:
                if image.shape != shape[1:] or image.dtype != np.uint8:
                    raise ValueError(f"image {written} must be uint8 {list(shape[1:])}, got {image.dtype} {list(image.shape)}")
                file.write(np.ascontiguousarray(image).data)
                written += 1
        if written != count:
            raise ValueError(f"images must be {count}, got {written}")


def read_adm_samples(path: str | Path) -> tuple[tuple[int, int, int, int], Iterator[np.ndarray]]:
    """Return the shape `(N, Y, X, 3)` and an iterator over uint8 images `[Y, X, 3]` of a sample batch (`.npz` or `.npy`)."""
    file = expand_user(path, "samples")
    if not file.is_file():
        raise FileNotFoundError(f"{str(file)!r} does not exist")
    if file.suffix == ".npy":
        return _read_npy_samples(file)
    try:
        with zipfile.ZipFile(file) as archive, archive.open(_SAMPLES) as opened:
            shape, dtype = _header(opened)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise ValueError(f"{file} is damaged or holds no arr_0, which a batch of samples does ({error})") from error
    if len(shape) != 4 or shape[3] != 3 or dtype != np.uint8:
        raise ValueError(f"{file} must hold arr_0 of uint8 [N, Y, X, 3], got {dtype} {list(shape)}")
    return shape, _read_images(file, shape)


def _read_npy_samples(file: Path) -> tuple[tuple[int, int, int, int], Iterator[np.ndarray]]:
    try:
        held = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged, or holds pickled data, which is not opened") from error
    if held.ndim != 4 or held.shape[3] != 3 or held.dtype != np.uint8:
        raise ValueError(f"{file} must hold uint8 [N, Y, X, 3], got {held.dtype} {list(held.shape)}")
    return held.shape, (np.array(image) for image in held)


def _header(opened: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(opened)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(opened)
    if fortran:
        raise ValueError("columns come first in it")
    return shape, dtype


def _read_images(file: Path, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(file) as archive, archive.open(_SAMPLES) as opened:
        _header(opened)
        size = int(np.prod(shape[1:]))
        for number in range(shape[0]):
            data = opened.read(size)
            if len(data) < size:
                raise ValueError(f"{file} is cut off: it ends in image {number} of {shape[0]}")
            yield np.frombuffer(data, np.uint8).reshape(shape[1:])


def contains_samples(path: Path, alone: bool = False) -> bool:
    """Return whether an `.npz` holds a batch of samples; with `alone`, also require that it holds no statistics."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} is damaged or not a .npz file ({error})") from error
    return _SAMPLES in names and not (alone and "mu.npy" in names)
