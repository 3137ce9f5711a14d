"""Conversion of causal video models with Wan2.1's layout, such as Self-Forcing, to a folder for vargen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from vargen.convert.state_dicts import State, build_network, describe_network, validate_dtype, validate_input_files
from vargen.convert.video_checkpoints import find_published
from vargen.convert.wan_parts import WanPart, read_wan_parts
from vargen.convert.wan_transformer import detect_transformer, read_transformer, resolve_latent_size
from vargen.files import atomic_folder
from vargen.model_files import write_model_index
from vargen.models.causal_video.cache import validate_attention_window
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.values import parse_int, short_repr

_FRAMES = 21  # latent frames of the videos on which the official models were trained
_BLOCK_FRAMES, _STEPS, _SHIFT = 3, "1000,750,500,250", 5.0  # of Self-Forcing
_MAX_TIMESTEP = 1000


def convert_causal_video(
    transformer: Sequence[Path],
    wan: Path,
    output: Path,
    *,
    draft: Sequence[Path] = (),
    block_frames: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
    steps: str | None = None,
    draft_steps: str | None = None,
    no_warp: bool = False,
    image: bool = False,
    no_ema: bool = False,
    n_head: int | None = None,
    size: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Convert a causal video model in Wan2.1's layout, such as Self-Forcing's, to a model folder.

    Settings that weights do not determine are those of the published model, if the file name is known, else of Self-Forcing.

    Args:
        transformer: `.pt`, `.pth`, `.bin` or `.safetensors` files; several files are parts of one model.
        wan: folder of Wan2.1, original or in diffusers' format, for the autoencoder, text encoder and tokenizer.
        output: folder to create. It appears whole or not at all.
        draft: files of a smaller or faster model that drafts. Weights equal to the transformer's are stored once.
        block_frames: latent frames per block.
        window: maximum number of latent frames that a block attends to, with itself and the sinks. Default: all.
        sinks: how many of them are the first frames of the video.
        steps: timesteps, from 1000 down, before warping, separated by commas.
        draft_steps: timesteps of the drafting model; without draft, the transformer drafts with these.
        no_warp: timesteps are noise levels times 1000 already.
        image: videos may start from an image, as the model was trained with a single first frame.
        no_ema: prefer the weights that are not averaged, where a file has both.
        n_head: number of attention heads, for a width that is not a multiple of 128. Those of a drafting model have the same
            width.
        size: rows and columns of the videos, in pixels. Default: 480 832, or 704 1280 for Wan2.2's latents.
        dtype: storage dtype of transformers; by default that of the file.

    Raises:
        FileExistsError, OSError: `output` cannot be written; raised before anything is read.
        FileNotFoundError: an input is missing.
        ValueError: a file is damaged, holds more than tensors, is of another kind of model or one that runs another algorithm,
            lacks a tensor, or has one of a wrong shape; the models do not match; or a setting is out of range. Raised before
            weights are read, except for weights that are not finite.
    """
    validate_dtype(dtype)
    given = {"block_frames": block_frames, "window": window, "sinks": sinks, "steps": steps, "no_warp": no_warp or None}
    with atomic_folder(output) as folder:
        validate_input_files(wan=wan)
        state = read_transformer(transformer, "transformer", not no_ema)
        settings = _published_settings(transformer[0]) | {name: value for name, value in given.items() if value is not None}
        defaults = _validate_settings(settings, image, draft_steps)
        config = detect_transformer(state, transformer[0], n_head)
        config |= resolve_latent_size(size, config["channels"], config["patch"])
        config["block_frames"] = settings.get("block_frames", _BLOCK_FRAMES)
        describe_network(CausalVideoTransformer, config, state, transformer[0])
        networks = {"transformer": (config, state, transformer[0])}
        if draft:
            drafting = read_transformer(draft, "draft", not no_ema)
            head_dim = config["dim"] // config["num_heads"]
            draft_config = config | detect_transformer(drafting, draft[0], head_dim=head_dim)
            describe_network(CausalVideoTransformer, draft_config, drafting, draft[0])
            _validate_pair(draft_config, draft[0], config, transformer[0])
            defaults |= _draft_defaults(draft[0], draft_steps, defaults)
            if not _same_weights(drafting, state):
                networks["draft_transformer"] = (draft_config, drafting, draft[0])
            elif "draft_steps" not in defaults:
                raise ValueError(f"draft {draft[0]} holds the weights of the transformer: give draft_steps, with fewer steps")
        parts = read_wan_parts(wan)
        _validate_parts(parts, config, wan, transformer[0])
        kinds: dict[str, Any] = {}
        for name, (arguments, weights, file) in networks.items():
            build_network(CausalVideoTransformer, arguments, weights, file, dtype).save_pretrained(folder / name)
            kinds[name] = CausalVideoTransformer
        for name, part in parts.items():
            part.write(folder / name)
            kinds[name] = part.kind
        write_model_index(folder, "CausalVideoPipeline", kinds, defaults=defaults)
    return output


# -- settings --------------------------------------------------------------------------------------------------------------


def _published_settings(file: Path) -> dict[str, Any]:
    found = find_published(file)
    return {} if found is None else dict(found.settings)


def _validate_settings(settings: Mapping[str, Any], image: bool, draft_steps: str | None) -> dict[str, Any]:
    """Return the `defaults` of the folder."""
    block, window = settings.get("block_frames", _BLOCK_FRAMES), settings.get("window")
    sinks = settings.get("sinks", 0)
    if parse_int(block, 1, _FRAMES) is None:
        raise ValueError(f"block_frames must be a whole number from 1 to {_FRAMES}, got {short_repr(block)}")
    validate_attention_window(window, sinks, block)
    return {
        "steps": parse_steps(settings.get("steps", _STEPS), "steps"),
        "shift": 1.0 if settings.get("no_warp") else _SHIFT,
        **({} if draft_steps is None else {"draft_steps": parse_steps(draft_steps, "draft_steps")}),
        "num_blocks": _FRAMES // block,
        "window": window,
        "sinks": sinks,
        "image": image or bool(settings.get("image")),
        "prompt_cleaning": "whitespace",
    }


def parse_steps(text: str, name: str) -> list[float]:
    """Parse timesteps that are separated by commas."""
    try:
        steps = [float(part) for part in str(text).split(",")]
    except ValueError:
        steps = []
    if not steps or not all(a > b for a, b in pairwise(steps)) or not 0 < steps[-1] <= steps[0] <= _MAX_TIMESTEP:
        raise ValueError(f"{name} must fall from at most {_MAX_TIMESTEP} to above 0, such as {_STEPS}, got {short_repr(text)}")
    return steps


def _draft_defaults(file: Path, draft_steps: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the timesteps of a published drafting model, if they differ from those of the transformer."""
    published = find_published(file)
    if draft_steps is not None or published is None:
        return {}
    if bool(published.settings.get("no_warp")) != (defaults["shift"] == 1):
        raise ValueError(f"draft {file} and transformer differ in whether timesteps are warped: give draft_steps")
    steps = parse_steps(published.settings.get("steps", _STEPS), "steps")
    return {} if steps == defaults["steps"] else {"draft_steps": steps}


# -- what belongs together -------------------------------------------------------------------------------------------------


def _same_weights(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a
    )


def _validate_pair(draft: Mapping[str, Any], draft_file: Path, config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError unless two transformers exchange latents and take the same text features."""
    published = _published_settings(draft_file).get("block_frames", config["block_frames"])
    if published != config["block_frames"]:
        frames = f"blocks of {published} and {config['block_frames']} latent frames"
        raise ValueError(f"draft {draft_file} and transformer {file} do not belong together: they have {frames}")
    for name, what in (("channels", "latent channels"), ("text_dim", "columns of text features")):
        if draft[name] != config[name]:
            raise ValueError(
                f"draft {draft_file} and transformer {file} do not belong together: they have {draft[name]} and {config[name]} "
                f"{what}"
            )


def _validate_parts(parts: Mapping[str, WanPart], config: Mapping[str, Any], wan: Path, file: Path) -> None:
    """Raise ValueError unless the transformer has the latents of the autoencoder and the features of the text encoder."""
    vae, text = parts["vae"].config, parts["text_encoder"].config
    if (vae["z_dim"], config["channels"]) in ((16, 48), (48, 16)):
        kinds = {16: "Wan2.1", 48: "Wan2.2-TI2V-5B"}
        found, expected = kinds[vae["z_dim"]], kinds[config["channels"]]
        raise ValueError(
            f"transformer {file} has the {config['channels']} latent channels of {expected}, and wan {str(wan)!r} the "
            f"autoencoder of {found}, with {vae['z_dim']}: give the folder of {expected}"
        )
    pairs = (
        ("latent channels", vae["z_dim"], config["channels"]),
        ("pixels per latent position", vae["scale_factor_spatial"], config["spatial_stride"]),
        ("columns of text features", text["d_model"], config["text_dim"]),
    )
    for what, found, expected in pairs:
        if found != expected:
            raise ValueError(f"wan {str(wan)!r} and transformer {file} do not belong together: {found} and {expected} {what}")
