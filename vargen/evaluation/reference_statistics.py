"""Mean and covariance of features, in the file formats of the field.

The evaluation suite of ADM (Dhariwal and Nichol 2021) stores reference statistics as `.npz` with `mu` and `sigma`, and batches
of samples as `.npz` with `arr_0`, uint8 `[N, Y, X, 3]`. Both can be read and written here. Our files also record the extractor
and the number of images, in additional arrays that other programs ignore.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vargen.files import atomic_file, expand_user

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
