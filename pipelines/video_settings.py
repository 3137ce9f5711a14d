"""Settings that a video checkpoint stores in its folder, and what its components must agree in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from html import unescape
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from vargen.assets import packaged_models
from vargen.decoding.video.denoising import SHIFT, STEPS, TIMESTEPS, shifted_levels
from vargen.decoding.video.policies import validate_threshold
from vargen.folders.networks import require_equal
from vargen.models.causal_video.network import geometry_from_config
from vargen.values import parse_float, parse_int, short_repr

# Settings that `defaults` may contain, with the values used otherwise.
DEFAULT_SETTINGS: dict[str, Any] = {
    "levels": None,  # noise levels of the steps; None: those of `steps`
    "steps": STEPS,  # timesteps before warping
    "shift": SHIFT,  # of the warp; 1 for none
    "draft_steps": None,  # timesteps of the drafting model; None: the target's steps
    "euler": False,  # integrate the velocity instead of adding fresh noise to each estimate
    "guidance": 1.0,
    "num_blocks": 8,
    "tau": None,  # None: the method's
    "window": None,
    "sinks": 0,
    "caption_rows": 64,
    "scored_frames": None,  # frames of a drafted block to score; None: all
    "image": True,  # whether videos may start from an image
    "image_frames": 1,  # number of latent frames that show the start image
    "image_scale": 1.0,  # size of the start image relative to the frame, if the prompt has one of `motions`: room to move
    "image_candidates": 1,  # number of images that an image model generates, of which the best one is the start image
    "image_model": None,  # packaged model that generates start images, unless a user asks for another
    "motions": None,  # phrases that ask for a motion, such as "bouncing", which a start image is generated without
    "prompt_cleaning": None,  # "whitespace": as Wan's text encoder was trained
}
_LIMITS = {  # minimum and maximum
    "num_blocks": (1, 100_000),
    "window": (1, 1_000_000),
    "sinks": (0, 1_000_000),
    "caption_rows": (1, 65_536),
    "scored_frames": (1, 1024),
    "image_frames": (1, 64),
    "image_candidates": (1, 64),
}
_MAX_SHIFT = 100.0


def resolve_setting(defaults: Mapping[str, Any] | None, name: str) -> Any:
    """Return a checkpoint's value of a setting, else the one in `DEFAULT_SETTINGS`."""
    value = (defaults or {}).get(name)
    return DEFAULT_SETTINGS[name] if value is None else value


def resolve_levels(defaults: Mapping[str, Any] | None, draft: bool = False) -> tuple[float, ...]:
    """Return the noise levels of a checkpoint's steps, for the target or for the drafting model."""
    steps = resolve_setting(defaults, "draft_steps") if draft else None
    levels = resolve_setting(defaults, "levels")
    if steps is None and levels is not None:
        return tuple(levels)
    return shifted_levels(steps or resolve_setting(defaults, "steps"), resolve_setting(defaults, "shift"))


def clean_whitespace(text: str) -> str:
    """Repair Unicode (with ftfy, if it is installed) and HTML entities, and merge white space, as for Wan's text encoder."""
    with suppress(ImportError):
        import ftfy

        text = ftfy.fix_text(text)
    return " ".join(unescape(unescape(text)).split())


def validate_settings(defaults: Any, transformer: Any = None) -> None:
    """Raise ValueError unless it is None or a dict of valid settings in `DEFAULT_SETTINGS`."""
    if defaults is None:
        return
    if not isinstance(defaults, dict) or any(name not in DEFAULT_SETTINGS for name in defaults):
        raise ValueError(f"defaults must be a dict of {', '.join(DEFAULT_SETTINGS)}, or None, got {short_repr(defaults)}")
    given = {name: value for name, value in defaults.items() if value is not None}
    for name, maximum in (("levels", 1), ("steps", TIMESTEPS), ("draft_steps", TIMESTEPS)):
        if name in given and not _falls(given[name], maximum):
            raise ValueError(f"defaults: {name} must fall from at most {maximum} to above 0, got {short_repr(given[name])}")
    for name in ("euler", "image"):
        if not isinstance(given.get(name, False), bool):
            raise ValueError(f"defaults: {name} must be true or false, got {short_repr(given[name])}")
    motions = given.get("motions", [])
    if not isinstance(motions, list | tuple) or not all(isinstance(each, str) and each.strip() for each in motions):
        raise ValueError(f"defaults: motions must be a list of phrases, got {short_repr(motions)}")
    if "image_model" in given and given["image_model"] not in (packaged := packaged_models()):
        raise ValueError(f"defaults: image_model must be one of {', '.join(packaged)}, got {short_repr(given['image_model'])}")
    guidance, shift = parse_float(given.get("guidance", 1.0)), parse_float(given.get("shift", SHIFT))
    if guidance is None or guidance < 0:
        raise ValueError(f"defaults: guidance must be a number of at least 0, got {short_repr(given['guidance'])}")
    if shift is None or not 0 < shift <= _MAX_SHIFT:
        raise ValueError(f"defaults: shift must be a number above 0, up to {_MAX_SHIFT:g}, got {short_repr(given['shift'])}")
    image_scale = parse_float(given.get("image_scale", 1.0))
    if image_scale is None or not 0 < image_scale <= 1:
        raise ValueError(f"defaults: image_scale must be a number above 0, up to 1, got {short_repr(given['image_scale'])}")
    if given.get("prompt_cleaning", "whitespace") != "whitespace":
        raise ValueError(f"defaults: prompt_cleaning must be 'whitespace' or null, got {short_repr(given['prompt_cleaning'])}")
    for name, (minimum, maximum) in _LIMITS.items():
        if name in given and parse_int(given[name], minimum, maximum) is None:
            allowed = f"a whole number from {minimum} to {maximum}"
            raise ValueError(f"defaults: {name} must be {allowed}, got {short_repr(given[name])}")
    try:
        validate_threshold(given.get("tau", 0.0))
    except ValueError as error:
        raise ValueError(f"defaults: {error}") from error


def _falls(values: Any, maximum: float) -> bool:
    """Whether values are a non-empty list of numbers that fall from at most `maximum` to above 0."""
    numbers = [parse_float(value) for value in values] if isinstance(values, list | tuple) else []
    found = [number for number in numbers if number is not None]
    if not found or len(found) < len(numbers):
        return False
    return all(a > b for a, b in pairwise(found)) and 0 < found[-1] <= found[0] <= maximum


LORA_SIZE = ("dim", "ffn_dim", "num_layers")  # of a LoRA and its network


def validate_geometry(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the draft transformer, its LoRA and the VAE belong to each other and to the transformer.

    Args:
        configs: configuration by component, None for a missing one.
    """
    geometry = geometry_from_config(SimpleNamespace(**configs["transformer"]))
    if draft := configs.get("draft_transformer"):
        other = geometry_from_config(SimpleNamespace(**draft))
        if not geometry.same_latents(other):
            raise ValueError(f"draft_transformer and transformer do not belong together: {other} and {geometry}")
    if configs.get("draft_image_lora"):
        for name in LORA_SIZE:
            require_equal(configs, "draft_image_lora", name, "draft_transformer", name)
    vae = configs.get("vae") or {}
    strides = {"scale_factor_spatial": geometry.spatial_stride, "scale_factor_temporal": geometry.temporal_stride}
    for name, stride in strides.items():
        if vae.get(name, stride) != stride:
            raise ValueError(f"vae and transformer do not belong together: {name} of vae is {vae[name]}, expected {stride}")
    for name in ("latents_mean", "latents_std"):
        if len(vae.get(name, [0.0] * geometry.channels)) != geometry.channels:
            raise ValueError(f"vae must have {name} for {geometry.channels} channels, got {len(vae[name])} numbers")
    size = vae.get("size")
    if size is not None and (size, size) != geometry.pixel_size:
        raise ValueError(
            f"vae and transformer do not belong together: frames of the vae are {size} pixels square, those of the "
            f"transformer's latents {list(geometry.pixel_size)}"
        )
