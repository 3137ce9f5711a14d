"""Images in and out: results, pixels of tokens, input images, sources and masks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from vargen.decoding import DecodeStats
from vargen.files import atomic_file, expand_user
from vargen.image_metadata import png_file
from vargen.models.tokenizers.bsq import BitQuantizer
from vargen.models.tokenizers.multi_scale_vq import MultiScaleQuantizer
from vargen.models.tokenizers.vq import NonFinitePixelsError
from vargen.pipelines.validation import OUTPUT_TYPES
from vargen.reading import apply_orientation, on_white
from vargen.values import parse_float, require_int, short_repr

if TYPE_CHECKING:
    from vargen.pipelines.regeneration import CallRecord

logger = logging.getLogger("vargen")
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_CELLS_AT_ONCE = 2**14  # whose pixels are decoded at a time: 64 images of 16 x 16 tokens


@dataclass(repr=False)
class ImagePipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        images: depending on `output_type`, a list of PIL images, a float32 NumPy array `[B, Y, X, 3]` or torch tensor
            `[B, 3, Y, X]` in [0, 1], or tokens: int64 `[B, rows, columns]`, or `[B, L]` for a model of several scales, from
            coarse to fine, -1 in skipped scales.
        stats: statistics of decoding; see `vargen.decoding.DecodeStats`.
        tokens: int64 `[B, N]`, of all scales for a model of several.
        log_probs, plain_log_probs: float32 `[B, N]`, if they were requested; see `compute_log_probs`.
    """

    images: Any
    stats: DecodeStats
    tokens: Tensor | None = None
    log_probs: Tensor | None = None
    plain_log_probs: Tensor | None = None
    _call: ClassVar[CallRecord | None] = None

    def __repr__(self) -> str:
        """One line: the number of images, passes, tokens per pass, seconds and seeds."""
        count = f"{len(self.images)} image{'s' if len(self.images) != 1 else ''}"
        return f"<{type(self).__name__}: {count}, {self.stats}>"

    def parameters(self, number: int = 0) -> dict[str, Any]:
        """Return the parameters with which image `number` is generated again."""
        if self._call is None or self.tokens is None:
            raise ValueError("this result was not returned by the call of a pipeline, so it has no parameters")
        require_int("number", number, 0, len(self.tokens) - 1)
        return self._call.describe(number, self.stats, self.tokens)

    def save(self, path: str | Path, number: int = 0) -> Path:
        """Write image `number` as a PNG that carries its `parameters`; returns the path."""
        file = expand_user(path, "path")
        if file.suffix.lower() != ".png":
            raise ValueError(f"path must end in .png, as only PNG files carry parameters, got {str(path)!r}")
        if not isinstance(self.images, list):
            raise ValueError("only PIL images can be saved: call the pipeline with output_type='pil'")
        parameters = self.parameters(number)
        data = png_file(self.images[number], parameters)
        with atomic_file(file) as temporary:
            temporary.write_bytes(data)
        return file


def validate_decode_arguments(tokens: Any, length: Any, output_type: Any, codes: int, minimum: int = 0) -> None:
    """Validate the arguments of `decode_tokens`: tokens are from `minimum` (-1 for none) to `codes` - 1."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {short_repr(output_type)}")
    if not isinstance(tokens, Tensor) or tokens.dtype not in _WHOLE:
        raise TypeError(f"tokens must be a tensor of whole numbers, got {short_repr(getattr(tokens, 'dtype', tokens))}")
    if tokens.numel() and not (minimum <= tokens.min() and tokens.max() < codes):
        raise ValueError(f"tokens must be from {minimum} to {codes - 1}, got {int(tokens.min())} to {int(tokens.max())}")
    if length is not None and tuple(length.shape) != (len(tokens),):
        raise ValueError(f"length must be [{len(tokens)}], one per image, got {list(length.shape)}")


def decode_pixels(decode: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Decode tokens `[B, N]`, `[B, R, G]` or latents `[B, C, R, G]` to pixels, float32 `[B, 3, Y, X]`, by parts of a batch."""
    cells = math.prod(tokens.shape[2:] if tokens.ndim == 4 else tokens.shape[1:])
    pixels = torch.cat([decode(part).float() for part in tokens.split(max(1, _CELLS_AT_ONCE // cells))])
    NonFinitePixelsError.check(pixels)
    return pixels


def preprocess_images(
    images: Any, processor: Any, side: int | tuple[int, int], name: str = "images", resizes: bool = True
) -> Tensor:
    """Convert images to float32 `[B, 3, Y, X]` in [-1, 1].

    Args:
        images: PIL images, a tensor `[B, 3, Y, X]` or an array `[B, Y, X, 3]`; floating-point numbers in [0, 1], or uint8.
        side: rows and columns, or the number of both; images of another size are resized, or refused.
        name: name of the argument in error messages.
    """
    rows, columns = (side, side) if isinstance(side, int) else side
    if isinstance(images, Tensor | np.ndarray):
        if images.ndim not in (3, 4) or 0 in images.shape:
            raise ValueError(f"{name} must be [B, 3, Y, X] as a tensor, [B, Y, X, 3] as an array, got {list(images.shape)}")
        sizes = [tuple(images.shape[-2:] if isinstance(images, Tensor) else images.shape[-3:-1])]
        numbers = torch.as_tensor(images)
        numbers = numbers / 255 if numbers.dtype == torch.uint8 else numbers
        if not numbers.is_floating_point():
            raise TypeError(f"{name} must hold floating-point numbers from 0 to 1, or be uint8, got {images.dtype}")
        if not ((numbers >= 0) & (numbers <= 1)).all():  # NaN is no number from 0 to 1, either
            raise ValueError(f"{name} must hold numbers from 0 to 1, or be uint8, got other numbers")
        images = numbers.float() if isinstance(images, Tensor) else numbers.float().numpy()
    else:
        images = _list_images(images, name, "PIL images, or a float tensor [B, 3, Y, X] in [0, 1]")
        sizes = [(image.height, image.width) for image in images]
        images = [on_white(image) for image in images]
    if not resizes and (other := [size for size in sizes if size != (rows, columns)]):
        found = f"{other[0][1]}x{other[0][0]}; crop or resize it"
        raise ValueError(f"{name} must be {columns}x{rows} pixels, the size of this model, got {found}")
    pixels: Tensor = processor.preprocess(images, height=rows, width=columns)
    return pixels


def _list_images(given: Any, name: str, allowed: str) -> list[Image.Image]:
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not found or not all(isinstance(image, Image.Image) for image in found):
        raise TypeError(f"{name} must be {allowed}, got {short_repr(given)}")
    return found


DEFAULT_VARIATION_STRENGTH, DEFAULT_INPAINT_STRENGTH = 0.8, 1.0  # default strength without and with a mask
_TRANSITION = 64  # width of a transition at the border of a mask, in fractions of the image
_HALF = 0.5  # threshold of mask values, and of the kept fraction of a token's area


@dataclass(frozen=True)
class InpaintSource:
    """Source image of a variation or of inpainting.

    Attributes:
        pixels: float32 `[N, 3, Y, X]` in [-1, 1].
        mask: bool `[M, 1, Y, X]`, M is 1 or N; True in the area to regenerate. None: the whole image.
        strength: fraction of the scales to regenerate, in [0, 1].
    """

    pixels: Tensor
    mask: Tensor | None
    strength: float

    def blend(self, pixels: Tensor) -> Tensor:
        """Put the source's own pixels where the mask keeps them, with a transition; float32 `[B, 3, Y, X]` in [0, 1]."""
        assert self.mask is not None
        own, area = (part.to(pixels.device).repeat_interleave(len(pixels) // len(part), 0) for part in (self.pixels, self.mask))
        width = max(1, pixels.shape[-1] // _TRANSITION)
        near = F.avg_pool2d(area.float(), 2 * width + 1, stride=1, padding=width, count_include_pad=False)
        weight = torch.where(area, 1.0, (2 * near).clamp(max=1))
        return torch.lerp(own / 2 + 0.5, pixels, weight)


def validate_source(image: Any, mask: Any, strength: Any, side: int | tuple[int, int], processor: Any) -> InpaintSource | None:
    """Validate image, mask and strength of a call, of these rows and columns, or as many; None without an image."""
    if image is None:
        for name, value in (("mask_image", mask), ("strength", strength)):
            if value is not None:
                raise ValueError(f"{name} says what to do with an image, and none is given")
        return None
    usual = DEFAULT_VARIATION_STRENGTH if mask is None else DEFAULT_INPAINT_STRENGTH
    share = usual if strength is None else parse_float(strength)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"strength must be from 0 (keep the image) to 1 (regenerate all of it), got {short_repr(strength)}")
    pixels = preprocess_images(image, processor, side, "image", resizes=False)
    return InpaintSource(pixels, None if mask is None else _mask(mask, len(pixels), side), share)


def _mask(mask: Any, images: int, side: int | tuple[int, int]) -> Tensor:
    """Convert a mask to bool `[M, 1, Y, X]`, True in the area to regenerate; warns where this is nothing or everything."""
    allowed = "a PIL image, a list of them, or numbers from 0 (keep) to 1 (regenerate) [Y, X] or [N, 1, Y, X]"
    if isinstance(mask, Tensor | np.ndarray):
        values = torch.as_tensor(mask)
        values = values / 255 if values.dtype == torch.uint8 and (values > 1).any() else values
        if values.ndim not in (2, 3, 4) or (values.ndim == 4 and values.shape[1] != 1):
            raise ValueError(f"mask_image must be {allowed}, got {list(values.shape)}")
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"mask_image must be {allowed}, got other numbers")
        areas = list(values.reshape(-1, 1, *values.shape[-2:]) >= _HALF)
    else:
        areas = [torch.from_numpy(read_mask(each))[None] for each in _list_images(mask, "mask_image", allowed)]
    rows, columns = (side, side) if isinstance(side, int) else side
    if other := [each for each in areas if each.shape[-2:] != (rows, columns)]:
        found = f"{other[0].shape[-1]}x{other[0].shape[-2]}"
        raise ValueError(f"mask_image must be {columns}x{rows} pixels, as the image is, got {found}")
    if len(areas) not in (1, images):
        raise ValueError(f"mask_image must be one, or one per image, got {len(areas)} for {images}")
    for each, area in zip(mask if isinstance(mask, list | tuple) else [mask] * len(areas), areas, strict=True):
        if area.all() or not area.any():
            name, extent = _name_mask(each), "the whole image" if area.all() else "nothing"
            logger.warning("%s regenerates %s; white or transparent pixels are regenerated, others are kept", name, extent)
    return torch.stack(areas)


def _name_mask(mask: Any) -> str:
    """Return the argument, with the file that an image comes from."""
    file = getattr(mask, "filename", "")
    return f"mask_image {short_repr(str(file))}" if file else "mask_image"


def read_mask(image: Image.Image) -> np.ndarray:
    """Return the area of a mask that is to be regenerated, bool `[Y, X]`.

    If parts of the image are transparent, these are the area, as in OpenAI's interface and in image editors. Else it is where
    the brightest channel is at least half of the largest value: 1 if no pixel has more, else 255, or 65535 in modes of more
    bits.
    """
    name, image = _name_mask(image), apply_orientation(image)
    if image.has_transparency_data:
        layer = np.asarray(image.convert("RGBA"))
        opaque = _at_least_half(layer[..., 3])
        if opaque.any() and not opaque.all() and (layer[opaque, :3] == 255).all():
            logger.warning("%s is white on transparent: its transparent area is regenerated, and the white one is kept", name)
        if not opaque.all():
            return ~opaque
    values = np.asarray(image if image.mode.startswith(("1", "I", "F")) else image.convert("RGB"))
    return _at_least_half(values.max(axis=2) if values.ndim == 3 else values)


def _at_least_half(values: np.ndarray) -> np.ndarray:
    """Return where numbers of any dtype are at least half of 1, 255 or 65535, the first that none exceeds."""
    largest = next((bound for bound in (1, 255, 65535) if values.max() <= bound), None)
    if largest is None or values.min() < 0:
        raise ValueError(f"mask_image must hold values from 0 to 1, 255 or 65535, got {values.min():g} to {values.max():g}")
    return values >= _HALF * largest


@dataclass(frozen=True)
class FixedTokens:
    """Tokens of source images that are kept: coarse scales, and the unmasked area of finer ones.

    For the area, it quantizes the difference between the source image's latent and the latent generated so far, instead of the
    source image itself, because coarse generated tokens overlap the area and their error must be corrected at finer scales.

    Attributes:
        scales: tokens `[B, n]` of the kept coarse scales.
        quantizer: quantizer of the image tokenizer.
        latent: float32 `[B, C, R, G]`, latents of the source images before quantization.
        kept_area: float32 `[B, 1, R, G]`, 1 in latent cells of which no pixel is masked; None without a mask.
    """

    scales: list[Tensor]
    quantizer: MultiScaleQuantizer | BitQuantizer
    latent: Tensor
    kept_area: Tensor | None

    @classmethod
    def build(
        cls, quantizer: MultiScaleQuantizer | BitQuantizer, latent: Tensor, mask: Tensor | None, num_scales: int
    ) -> FixedTokens:
        """Build it from the number of kept scales and a mask, bool `[B, 1, Y, X]`, True where regenerated."""
        area = None
        if mask is not None:
            area = 1 - F.max_pool2d(mask.to(latent.device, torch.float32), mask.shape[-1] // latent.shape[-1])
        tokens = quantizer.quantize(latent)[:num_scales]
        return cls([part.flatten(1) for part in tokens], quantizer, latent.float(), area)

    def select_rows(self, rows: slice) -> FixedTokens:
        """Return the same for some of the images."""
        area = None if self.kept_area is None else self.kept_area[rows]
        return FixedTokens([tokens[rows] for tokens in self.scales], self.quantizer, self.latent[rows], area)

    def __call__(self, canvas: Tensor, scale: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[B, n]` for a scale, given the latent so far `[B, C, R, G]`, and bool `[B, n]`, True where kept."""
        area = self.kept_area
        assert area is not None
        share = self.quantizer.downsample(area, scale)
        residual = self.quantizer.downsample((self.latent - canvas) * area, scale) / share.clamp(min=1e-6)
        return self.quantizer.find_nearest(residual, scale).flatten(1), self.quantizer.spread(share >= _HALF, scale)
