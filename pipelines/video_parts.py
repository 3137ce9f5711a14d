"""Checks, from configurations alone, that the components of a video model match, and that its `defaults` are valid."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from vargen.decoding.video.policies import validate_threshold
from vargen.models.causal_video import geometry_from_config
from vargen.values import parse_float, parse_int, short_repr

# Settings that `defaults` may contain, with the values used otherwise.
USUAL: dict[str, Any] = {
    "levels": None,  # noise levels of the steps; None: those of the distilled models
    "euler": False,  # integrate the velocity instead of adding fresh noise to each estimate
    "guidance": 1.0,
    "num_blocks": 8,
    "tau": None,  # None: the method's
    "window": None,
    "sinks": 0,
    "caption_rows": 64,
    "scored_frames": None,  # frames of a drafted block to score; None: all
}
_WHOLE = {  # minimum and maximum
    "num_blocks": (1, 100_000),
    "window": (1, 1_000_000),
    "sinks": (0, 1_000_000),
    "caption_rows": (1, 65_536),
    "scored_frames": (1, 1024),
}


class _Config:
    def __init__(self, values: Mapping[str, Any]):
        self.__dict__.update(values)


def check_parts(configs: Mapping[str, Any], defaults: Any) -> None:
    """Raise ValueError unless all networks share the latents, draft and target model the text features, and defaults are valid.

    Args:
        configs: configuration by component, None for a missing one.
        defaults: `defaults` of the pipeline.
    """
    check_defaults(defaults)
    target, draft = configs.get("transformer"), configs.get("draft_transformer")
    if not target:
        return
    geometry = geometry_from_config(_Config(target))
    if draft:
        other = geometry_from_config(_Config(draft))
        if not geometry.same_latents(other):
            raise ValueError(f"draft_transformer and transformer do not belong together: {other} and {geometry}")
        for name in ("text_dim", "motion_levels"):
            if draft[name] != target[name]:
                raise ValueError(
                    f"draft_transformer and transformer do not belong together: {name} is {draft[name]!r} and {target[name]!r}"
                )
    for part, name in (("vae", "latent_channels"), ("preview_decoder", "latent_channels")):
        config = configs.get(part)
        if config and name in config and config[name] != geometry.channels:
            raise ValueError(
                f"{part} and transformer do not belong together: {name} of the {part} is {config[name]!r}, channels of the "
                f"transformer are {geometry.channels}"
            )
    vae = configs.get("vae")
    if vae and "size" in vae and (vae["size"], vae["size"]) != geometry.pixel_size:
        raise ValueError(
            f"vae and transformer do not belong together: frames of the vae are {vae['size']} pixels square, the transformer's "
            f"latents are of frames {list(geometry.pixel_size)}"
        )
    encoder: Any = configs.get("text_encoder")
    width = encoder.get("hidden_size") if isinstance(encoder, Mapping) else getattr(encoder, "d_model", None)
    if isinstance(width, int) and width != target["text_dim"]:
        raise ValueError(
            f"text_encoder and transformer do not belong together: the encoder's features are {width} wide, the transformer "
            f"takes {target['text_dim']} (text_dim)"
        )


def check_defaults(defaults: Any) -> None:
    """Raise ValueError unless it is None or a dict of valid settings in `USUAL`."""
    if defaults is None:
        return
    if not isinstance(defaults, dict) or any(name not in USUAL for name in defaults):
        raise ValueError(f"defaults must be a dict of {', '.join(USUAL)}, or None, got {short_repr(defaults)}")
    given = {name: value for name, value in defaults.items() if value is not None}
    levels = given.get("levels", [1.0])
    numbers = [parse_float(level) for level in levels] if isinstance(levels, list | tuple) and levels else [None]
    falling = None not in numbers and all(a > b for a, b in pairwise(numbers))  # type: ignore[operator]
    if not falling or not 0 < numbers[-1] <= numbers[0] <= 1:  # type: ignore[operator]
        raise ValueError(f"defaults: levels must fall from at most 1 to above 0, got {short_repr(levels)}")
    if not isinstance(given.get("euler", False), bool):
        raise ValueError(f"defaults: euler must be true or false, got {short_repr(given['euler'])}")
    guidance = parse_float(given.get("guidance", 1.0))
    if guidance is None or guidance < 0:
        raise ValueError(f"defaults: guidance must be a number of at least 0, got {short_repr(given['guidance'])}")
    for name, (least, most) in _WHOLE.items():
        if name in given and parse_int(given[name], least, most) is None:
            raise ValueError(f"defaults: {name} must be a whole number from {least} to {most}, got {short_repr(given[name])}")
    try:
        validate_threshold(given.get("tau", 0.0))
    except TypeError as error:
        raise ValueError(f"defaults: {error}") from error
