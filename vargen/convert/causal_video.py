"""Conversion of causal video models with Wan2.1's layout, such as Self-Forcing, to a folder for `CausalVideoPipeline`.

Weights do not tell the frames of a block, noise levels and attention window, so published checkpoints are recognized by their
file names, and those that run another algorithm are refused (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import torch

from vargen.convert.state_dicts import (
    build_network,
    describe_network,
    require_equal,
    require_inputs,
    write_model_index,
)
from vargen.convert.wan import detect_transformer, read_transformer, read_wan_parts, resolve_latent_size
from vargen.files import atomic_folder
from vargen.folders.json_files import read_object
from vargen.models.causal_video.cache import validate_attention_window
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.tokenizers.video_vae import AutoencoderKLWan
from vargen.values import require_int, short_repr

_FRAMES = 21  # latent frames of the videos on which the official models were trained
_BLOCK_FRAMES, _STEPS, _SHIFT = 3, "1000,750,500,250", 5.0  # of Self-Forcing
# Settings that differ from those of Self-Forcing, by patterns of file names, with parent folders where needed.
PUBLISHED: dict[str, dict[str, Any]] = {
    "self_forcing_dmd.pt": {},
    "self_forcing_sid*.pt": {},
    "chunkwise/causal_forcing.pt": {},
    "framewise/causal_forcing.pt": {"block_frames": 1, "image": True},
    "framewise-2step.pt": {"block_frames": 1, "image": True, "steps": "1000,500"},
    "framewise-1step.pt": {"block_frames": 1, "image": True, "steps": "1000"},
    "autoregressive_checkpoint/model.pt": {"steps": "1000,757,522", "no_warp": True},  # CausVid
    "longlive_base.pt": {"window": 12, "sinks": 3},
    "self_forcing_dmd_14b.safetensors": {"steps": "1000,821,642,321"},
}
_ROLLING = "Rolling Forcing: it denoises several blocks together, and vargen one block at a time"
_KREA = "Krea Realtime 14B: it computes its cache again before each block, and vargen's would drift"
REFUSED = {
    "rolling_forcing_dmd.pt": _ROLLING,
    "chunkwise/longvideo.pt": _ROLLING,
    "krea-realtime-video*.safetensors": _KREA,
    "krea-realtime-video/transformer/*.safetensors": _KREA,
    "wan_causal_dmd_v2v*/model.pt": "StreamDiffusionV2: it restyles a video, and vargen generates one from noise",
    "rewardforcing.pt": "Reward Forcing: its sinks are a running mean of frames, and vargen's are the first ones",
}
# Classes in configurations beside the weights: of the original model, and of the folder of diffusers' format.
_NOT_CAUSAL = ("WanModel", "WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")


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

    Settings that weights do not determine are those of the published model by the file name, else of Self-Forcing.

    Args:
        transformer: `.pt`, `.pth`, `.bin` or `.safetensors` files; several files are parts of one model.
        wan: folder of Wan2.1 or Wan2.2 in diffusers' format, for the autoencoder, text encoder and tokenizer.
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
        n_head: number of attention heads, for a width that is not a multiple of 128. A drafting model's have the same width.
        size: rows and columns of the videos, in pixels. Default: 480 832, or 704 1280 for Wan2.2's latents.
        dtype: storage dtype of transformers; by default that of the file.
    """
    given = {"block_frames": block_frames, "window": window, "sinks": sinks, "steps": steps, "no_warp": no_warp or None}
    if not transformer:
        raise ValueError("transformer must be one file or more, got none")
    with atomic_folder(output) as folder:
        require_inputs(wan=wan)
        for file in (*transformer, *draft):
            require_inputs(**{"transformer" if file in transformer else "draft": file})
            _refuse_other_algorithms(file)
        file = transformer[0]
        state = read_transformer(transformer, not no_ema)
        settings = (_find(file, PUBLISHED) or {}) | {name: value for name, value in given.items() if value is not None}
        defaults = _validate_settings(settings, image, draft_steps)
        config = detect_transformer(state, file, n_head)
        config |= resolve_latent_size(size, config["channels"], config["patch"])
        config["block_frames"] = settings.get("block_frames", _BLOCK_FRAMES)
        networks = {"transformer": (config, state, file)}
        if draft:
            drafting = read_transformer(draft, not no_ema)
            head_dim = config["dim"] // config["num_heads"]
            draft_config = config | detect_transformer(drafting, draft[0], head_dim=head_dim)
            frames = (_find(draft[0], PUBLISHED) or {}).get("block_frames", config["block_frames"])
            require_equal(
                f"draft {draft[0]} and transformer {file}",
                ("latent frames per block", frames, config["block_frames"]),
                ("latent channels", draft_config["channels"], config["channels"]),
                ("columns of text features", draft_config["text_dim"], config["text_dim"]),
            )
            defaults |= _draft_defaults(draft[0], draft_steps, defaults)
            kinds_of = [{name: (part.dtype, part.shape) for name, part in each.items()} for each in (drafting, state)]
            if kinds_of[0] != kinds_of[1] or not all(torch.equal(drafting[name], state[name]) for name in state):
                networks["draft_transformer"] = (draft_config, drafting, draft[0])
            elif "draft_steps" not in defaults:
                raise ValueError(f"draft {draft[0]} holds the weights of the transformer: give draft_steps")
        for arguments, weights, source in networks.values():
            describe_network(CausalVideoTransformer, arguments, weights, source)
        parts = read_wan_parts(wan)
        vae, text = parts["vae"].config, parts["text_encoder"].config
        require_equal(
            f"wan {str(wan)!r} and transformer {file}",
            ("latent channels, of which Wan2.1 has 16 and Wan2.2-TI2V-5B 48", vae["z_dim"], config["channels"]),
            ("pixels per latent position", vae["scale_factor_spatial"], config["spatial_stride"]),
            ("columns of text features", text.d_model, config["text_dim"]),
        )
        import transformers  # takes seconds

        names = ("UMT5EncoderModel", parts["tokenizer"].class_name)
        text_encoder, tokenizer = (getattr(transformers, each) for each in names)
        kinds: dict[str, Any] = {"vae": AutoencoderKLWan, "text_encoder": text_encoder, "tokenizer": tokenizer}
        for name, (arguments, weights, source) in networks.items():
            build_network(CausalVideoTransformer, arguments, weights, source, dtype).save_pretrained(folder / name)
            kinds[name] = CausalVideoTransformer
        for name in parts:
            copytree(wan / name, folder / name)
        write_model_index(folder, "CausalVideoPipeline", kinds, defaults=defaults)
    return output


def _validate_settings(settings: Mapping[str, Any], image: bool, draft_steps: str | None) -> dict[str, Any]:
    """Return the `defaults` of the folder."""
    block, window = settings.get("block_frames", _BLOCK_FRAMES), settings.get("window")
    sinks = settings.get("sinks", 0)
    require_int("block_frames", block, 1, _FRAMES)
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
    falling = bool(steps) and all(a > b for a, b in pairwise(steps))
    if not falling or not 0 < steps[-1] <= steps[0] <= 1000:
        raise ValueError(f"{name} must fall from at most 1000 to above 0, such as {_STEPS}, got {short_repr(text)}")
    return steps


def _draft_defaults(file: Path, draft_steps: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the timesteps of a published drafting model, if they differ from those of the transformer."""
    published = _find(file, PUBLISHED)
    if draft_steps is not None or published is None:
        return {}
    if bool(published.get("no_warp")) != (defaults["shift"] == 1):
        raise ValueError(f"draft {file} and transformer differ in whether timesteps are warped: give draft_steps")
    steps = parse_steps(published.get("steps", _STEPS), "steps")
    return {} if steps == defaults["steps"] else {"draft_steps": steps}


def _find(file: Path, table: Mapping[str, Any]) -> Any:
    """Return the entry of a table by patterns of file names; None for other files."""
    path = "/".join(file.absolute().parts[-3:]).lower()
    return next((found for name, found in table.items() if fnmatch(path, name) or fnmatch(path, f"*/{name}")), None)


def _refuse_other_algorithms(file: Path) -> None:
    """Raise ValueError for a file whose tensors are those of this layout, but which runs another algorithm."""
    if (found := _find(file, REFUSED)) is not None:
        raise ValueError(f"{file} is {found}")
    named = "/".join(file.absolute().parts[-2:]).lower()
    if (file.parent.parent / "transformer_2").is_dir() or "high_noise" in named or "low_noise" in named:
        reason = "two experts, one for high and one for low noise levels, and vargen runs one network"
        raise ValueError(f"{file} belongs to a model of {reason}")
    if not file.name.startswith("diffusion_pytorch_model"):
        return
    places = (file.parent / "config.json", file.parent.parent / "model_index.json")
    for kind in (str(read_object(place).get("_class_name")) for place in places if place.is_file()):
        if kind in _NOT_CAUSAL:
            raise ValueError(f"{file} is Wan's own model, which is not causal: give a model distilled from it")
        if kind.startswith("AnyFlow"):
            raise ValueError(f"{file} is AnyFlow: it predicts averages over intervals of time, and vargen velocities")
