"""All recipes: their trainers and inputs, and which recipes produce these inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import vargen.assets
from recipes.emoji.dataset import build_emoji_dataset, load_emoji_dataset
from recipes.emoji.everyday import load_everyday_dataset
from recipes.emoji.scorer import ScorerConfig
from recipes.emoji.tokenizer import TokenizerConfig, train_tokenizer
from recipes.emoji.trainers import train_eagle, train_emoji_generator, train_emoji_low_res, train_emoji_scorer, train_medusa
from recipes.emoji_var.tokenizer import MultiScaleTokenizerConfig, train_multi_scale_tokenizer
from recipes.emoji_var.transformer import NextScaleConfig, train_next_scale
from recipes.emoji_video.autoencoder import AutoencoderConfig, train_autoencoder
from recipes.emoji_video.clips import build_video_dataset, load_video_dataset
from recipes.emoji_video.lora import LoRAConfig, train_video_lora
from recipes.emoji_video.preview import PreviewConfig, train_video_preview
from recipes.emoji_video.transformer import VideoConfig, train_video
from vargen.files import cache_folder, expand_user
from vargen.models.component_files import refuse_code_files
from vargen.training.heads import HeadConfig
from vargen.training.low_res import UpsamplerConfig, train_upsampler
from vargen.training.next_token import NextTokenConfig

PACKAGED = Path(vargen.assets.__file__).parent


@dataclass(frozen=True)
class Input:
    """A folder that a recipe reads: by default the output of another recipe or a packaged model; otherwise optional.

    Attributes:
        argument: of the trainer. recipe, packaged: the default. part: the sub-folder with the network.
        load: loads the folder; by default, the trainer does.
    """

    argument: str
    recipe: str = ""
    packaged: str = ""
    part: str = ""
    load: Callable[[Path], Any] | None = None


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, or a data set built.

    Attributes:
        config: frozen dataclass, read from a TOML file.
        run: called with a config, a folder, a device and the inputs by argument; returns metrics.
        inputs: by name on the command line.
        produces: the sub-folder with the trained network. file: name of the TOML file, if not the recipe's.
        folder: in `runs/`, if not the recipe's name: a recipe may continue the run of another one.
        cached: name of a folder in the user's cache, which is used instead of `runs/`.
    """

    config: type
    run: Callable[..., dict[str, Any]]
    inputs: dict[str, Input] = field(default_factory=dict)
    produces: str = ""
    file: str = ""
    folder: str = ""
    cached: str = ""


@dataclass(frozen=True)
class ImagesConfig:
    """Size of the images of emoji, in pixels."""

    size: int = 128


@dataclass(frozen=True)
class ClipsConfig:
    """Size of the frames of animated emoji, in pixels."""

    size: int = 64


def _build_images(config: ImagesConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    return _summary(build_emoji_dataset(folder, size=config.size))


def _build_clips(config: ClipsConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    return _summary(build_video_dataset(folder, size=config.size))


def _summary(built: Any) -> dict[str, Any]:
    splits = {split: len(built.indices(split)) for split in ("train", "validation")}
    return {"records": len(built.records), **splits, "report": built.report}


_DATA = {"data": Input("data", "emoji-data", load=load_emoji_dataset)}
_EVERYDAY_DATA = {"data": replace(_DATA["data"], load=load_everyday_dataset)}
_CLIPS = {"data": Input("data", "emoji-video-data", load=load_video_dataset)}
_TEXT = {"text-encoder": Input("text_encoder_folder", packaged="emoji")}
_MODEL = {"model": Input("model", packaged="emoji")}
_INIT = {"init": Input("init_folder", part="transformer")}
_TEACHER = Input("teacher_folder", part="transformer")
_CODES = Input("tokenizer_folder", "emoji-tokenizer", part="vqvae")
_PACKAGED_CODES = {"tokenizer": replace(_CODES, recipe="", packaged="emoji")}
_SCALE_CODES = {"tokenizer": replace(_CODES, recipe="emoji-var-tokenizer")}
_VAE = {"vae": Input("vae_folder", "emoji-video-vae", part="vae")}

_tokenizer = Recipe(TokenizerConfig, train_tokenizer, _DATA, "vqvae", folder="emoji-tokenizer")
_generator = Recipe(
    NextTokenConfig,
    train_emoji_generator,
    {**_DATA, "tokenizer": _CODES, **_TEXT, **_INIT},
    "transformer",
    folder="emoji-generator",
)
_scale_tokenizer = Recipe(
    MultiScaleTokenizerConfig, train_multi_scale_tokenizer, {**_DATA, "init": replace(_INIT["init"], part="vqvae")}, "vqvae"
)
_var = Recipe(
    NextScaleConfig, train_next_scale, {**_DATA, **_SCALE_CODES, **_TEXT, **_INIT, "teacher": _TEACHER}, "transformer"
)
_video = Recipe(VideoConfig, train_video, {**_CLIPS, **_VAE, **_TEXT, **_INIT, "teacher": _TEACHER}, "transformer")
_heads = {**_DATA, **_MODEL, "generated-images": Input("generated_images")}


def _from(recipe: Recipe, **defaults: str) -> Recipe:
    """Replace defaults of inputs by recipes, or by packaged models with the prefix `packaged:`."""
    inputs = dict(recipe.inputs)
    for key, source in defaults.items():
        kind, _, name = source.rpartition(":")
        inputs[key] = replace(inputs[key], recipe="" if kind else name, packaged=name if kind else "")
    return replace(recipe, inputs=inputs)


_everyday = _from(_generator, tokenizer="packaged:emoji", init="packaged:emoji")

_motions = Recipe(
    LoRAConfig,
    train_video_lora,
    {
        **_CLIPS,
        "vae": replace(_VAE["vae"], recipe="", packaged="emoji-video"),
        **_TEXT,
        "network": Input("network_folder", packaged="emoji-video", part="transformer"),
        "stills": Input("stills", "emoji-data", load=load_emoji_dataset),
    },
    "lora",
)
_drafter = replace(_motions.inputs["network"], part="draft_transformer")

RECIPES = {
    "emoji-data": Recipe(ImagesConfig, _build_images, cached="emoji-128"),
    "emoji-tokenizer": _tokenizer,
    "emoji-tokenizer-plain": _tokenizer,
    "emoji-tokenizer-decoder": _tokenizer,
    "emoji-tokenizer-gpu": _tokenizer,
    "emoji-generator": _generator,
    "emoji-generator-gpu": _generator,
    "emoji-everyday": replace(_everyday, inputs={**_everyday.inputs, **_EVERYDAY_DATA}, folder=""),
    "emoji-drafter": replace(_generator, folder=""),
    "emoji-low-res": Recipe(
        NextTokenConfig, train_emoji_low_res, {**_DATA, **_PACKAGED_CODES, **_TEXT, **_INIT}, "transformer", file="low-res"
    ),
    "emoji-upsampler": Recipe(UpsamplerConfig, train_upsampler, {**_DATA, **_PACKAGED_CODES}, "upsampler", file="upsampler"),
    "emoji-eagle": Recipe(HeadConfig, train_eagle, _heads, "drafter", file="eagle"),
    "emoji-medusa": Recipe(HeadConfig, train_medusa, _heads, "drafter", file="medusa"),
    "emoji-scorer": Recipe(ScorerConfig, train_emoji_scorer, {**_DATA, **_MODEL}, "scorer"),
    "emoji-var-tokenizer": _scale_tokenizer,
    "emoji-var-decoder": _from(_scale_tokenizer, init="packaged:emoji-var"),
    "emoji-var": _var,
    "emoji-var-small": _from(_var, teacher="emoji-var"),
    "emoji-var-gpu": _from(_var, tokenizer="packaged:emoji-var", init="packaged:emoji-var"),
    "emoji-var-balanced": _from(_var, tokenizer="packaged:emoji-var", init="packaged:emoji-var"),
    "emoji-var-focus": _from(_var, tokenizer="packaged:emoji-var", init="packaged:emoji-var"),
    "emoji-video-data": Recipe(ClipsConfig, _build_clips, cached="emoji-video-64"),
    "emoji-video-vae": Recipe(AutoencoderConfig, train_autoencoder, _CLIPS, "vae"),
    "emoji-video-preview": Recipe(PreviewConfig, train_video_preview, {**_CLIPS, **_VAE}, "preview"),
    "emoji-video-target": _video,
    "emoji-video-drafter": _video,
    "emoji-video-target-steps": _from(_video, teacher="emoji-video-target"),
    "emoji-video-drafter-steps": _from(_video, teacher="emoji-video-target", init="emoji-video-drafter"),
    "emoji-video-motions": _motions,
    "emoji-video-motions-drafter": replace(_motions, inputs={**_motions.inputs, "network": _drafter}),
}


def output_folder(name: str) -> Path:
    """Return the default output folder of a recipe."""
    recipe = RECIPES[name]
    return cache_folder() / recipe.cached if recipe.cached else Path("runs") / (recipe.folder or name)


def resolve_network_folder(folder: Any, part: str, name: str) -> Path:
    """Return the folder of a saved network: the subfolder `part` of a training run, or the given folder itself.

    Raises:
        FileNotFoundError: if there is no network; the message names the argument `name`.
        ValueError: if the folder contains code.
    """
    path = expand_user(folder, name)
    for place in (path / part, path):
        if (place / "config.json").is_file():
            refuse_code_files(place)
            return place
    raise FileNotFoundError(f"{name} must be a run's folder with {part}/, or a saved network, got {str(path)!r}")
