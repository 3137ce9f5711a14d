"""Settings that a video checkpoint stores in its folder, and what its components must agree in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import unescape
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from vargen.assets import packaged_models
from vargen.decoding.video.denoising import SHIFT, STEPS, TIMESTEPS, shifted_levels
from vargen.decoding.video.policies import validate_threshold
from vargen.folders.networks import require_equal
from vargen.models.causal_video.network import geometry_from_config
from vargen.values import number_field, one_line, parse_float, short_repr, validate_fields


@dataclass(frozen=True)
class VideoSettings:
    """Settings that the `defaults` of a checkpoint may contain, with the values used otherwise."""

    levels: Sequence[float] | None = None  # noise levels of the steps; None: those of `steps`
    steps: Sequence[float] = STEPS  # timesteps before warping
    shift: float = number_field(SHIFT, 0, 100, open_below=True)  # of the warp; 1 for none
    draft_steps: Sequence[float] | None = None  # timesteps of the drafting model; None: the target's steps
    euler: bool = False  # integrate the velocity instead of adding fresh noise to each estimate
    guidance: float = number_field(1.0, 0)
    num_blocks: int = number_field(8, 1, 100_000, is_integer=True)
    tau: float | None = None  # None: the method's
    window: int | None = number_field(None, 1, 1_000_000, is_integer=True, optional=True)
    sinks: int = number_field(0, 0, 1_000_000, is_integer=True)
    caption_rows: int = number_field(64, 1, 65_536, is_integer=True)
    scored_frames: int | None = number_field(None, 1, 1024, is_integer=True, optional=True)  # of a drafted block; None: all
    image: bool = True  # whether videos may start from an image
    image_frames: int = number_field(1, 1, 64, is_integer=True)  # number of latent frames that show the start image
    # Size of the start image relative to the frame, if the prompt has one of `motions`: room to move.
    image_scale: float = number_field(1.0, 0, 1, open_below=True)
    # Number of images that an image model generates, of which the best one is the start image.
    image_candidates: int = number_field(1, 1, 64, is_integer=True)
    image_model: str | None = None  # packaged model that generates start images, unless a user asks for another
    motions: Sequence[str] = ()  # phrases that ask for a motion, such as "bouncing", which a start image is generated without
    prompt_cleaning: str | None = None  # "whitespace": as Wan's text encoder was trained

    def __post_init__(self) -> None:
        validate_fields(self)
        for name, most in (("levels", 1), ("steps", TIMESTEPS), ("draft_steps", TIMESTEPS)):
            if (given := getattr(self, name)) is not None and not _falls(given, most):
                raise ValueError(f"{name} must fall from at most {most} to above 0, got {short_repr(given)}")
        if not isinstance(self.motions, list | tuple) or not all(isinstance(each, str) and each for each in self.motions):
            raise ValueError(f"motions must be a list of phrases, got {short_repr(self.motions)}")
        for name, known in (("image_model", packaged_models()), ("prompt_cleaning", ["whitespace"])):
            if (chosen := getattr(self, name)) is not None and chosen not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, or null, got {short_repr(chosen)}")
        if self.tau is not None:
            validate_threshold(self.tau)

    @classmethod
    def read(cls, defaults: Any, transformer: Any = None) -> VideoSettings:
        """Return the settings of a checkpoint; ValueError for an invalid one."""
        try:
            return cls(**{name: value for name, value in (defaults or {}).items() if value is not None})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"defaults: {one_line(error)}") from error

    def resolve_levels(self, draft: bool = False) -> tuple[float, ...]:
        """Return the noise levels of the steps, for the target or for the drafting model."""
        steps = self.draft_steps if draft else None
        if steps is None and self.levels is not None:
            return tuple(self.levels)
        return shifted_levels(steps or self.steps, self.shift)

    def clean(self, prompt: str) -> str:
        """Clean a prompt as in the training of Wan's text encoder, if the checkpoint asks for it."""
        if self.prompt_cleaning is None:
            return prompt
        with suppress(ImportError):
            import ftfy

            prompt = ftfy.fix_text(prompt)
        return " ".join(unescape(unescape(prompt)).split())


def _falls(values: Any, most: float) -> bool:
    """Whether values are a non-empty list of numbers that fall from at most `most` to above 0."""
    if not isinstance(values, list | tuple) or not values or None in map(parse_float, values):
        return False
    return all(a > b for a, b in pairwise(values)) and 0 < values[-1] <= values[0] <= most


LORA_SIZE = ("dim", "ffn_dim", "num_layers")  # of a LoRA and its network
# What two transformers with the same latents have in common.
LATENT_SIZES = ("channels", "height", "width", "block_frames", "spatial_stride", "temporal_stride", "fps")
# Settings of VAEs, and those of the transformer that they must equal.
VAE_SETTINGS = {
    "latent_channels": "channels",
    "z_dim": "channels",
    "scale_factor_spatial": "spatial_stride",
    "scale_factor_temporal": "temporal_stride",
}


def validate_geometry(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the LoRA of the draft transformer and the VAE fit; `configs` are by component."""
    if configs.get("draft_image_lora"):
        for name in LORA_SIZE:
            require_equal(configs, "draft_image_lora", name, "draft_transformer", name)
    geometry, vae = geometry_from_config(SimpleNamespace(**configs["transformer"])), configs.get("vae") or {}
    for name in ("latents_mean", "latents_std"):
        if len(vae.get(name, [0.0] * geometry.channels)) != geometry.channels:
            raise ValueError(f"vae must have {name} for {geometry.channels} channels, got {len(vae[name])} numbers")
    size = vae.get("size")
    if size is not None and (size, size) != geometry.pixel_size:
        raise ValueError(f"vae and transformer do not belong together: frames of {size} and {list(geometry.pixel_size)} pixels")
