"""Start images of videos: given, or generated from the prompt without its motion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.images import preprocess_images
from vargen.pipelines.loading import inspect_model, open_pipeline

if TYPE_CHECKING:
    from vargen.pipelines.causal_video import CausalVideoPipeline

_ADVERB = r"\w+ly"  # as in "quickly bouncing"
_PREPOSITION = r"(?:on|in|at|to|into|from|over|under|with)\b"  # what is left of "rolling on the floor" names no object


def remove_motion(prompt: str, motions: Sequence[str]) -> str | None:
    """Return a prompt without its motion: "a pizza" for "a quickly bouncing pizza".

    The result is None if it has none of `motions`, phrases such as "bouncing" and "bounces", or names nothing else.
    """
    phrases = "|".join(re.escape(each) for each in sorted(motions, key=len, reverse=True)) or "(?!)"
    pattern = rf"(?:\b(?:that|which)\s+)?(?:\b{_ADVERB}\s+)?\b(?:{phrases})\b(?:\s+{_ADVERB}\b)?"
    rest, count = re.subn(pattern, " ", prompt, flags=re.IGNORECASE)
    still = re.sub(r"\s+(?=[\s,.!?]|$)", "", rest).strip(" ,.!?")
    names_object = re.sub(r"\b(?:an?|the)\b", "", still).strip() and not re.match(_PREPOSITION, still, flags=re.IGNORECASE)
    return still if count and names_object else None


def find_image_model(pipe: Any, name: str | None = None) -> VisualPipeline | None:
    """Return the image model that generates start images, without weights; None if there is none.

    Args:
        pipe: of the videos. name: a packaged model or a folder; None for the one in the model's settings, `"none"` for none.
    """
    chosen = pipe.settings.image_model if name is None else name
    if chosen in (None, "none"):
        return None
    if not pipe.settings.image:
        raise ValueError(f"image_model must be left out: {pipe.folder.name} was not trained to start from an image")
    return _require_image_model(inspect_model(chosen), "image_model")


def open_image_pipe(name: str, device: torch.device) -> VisualPipeline:
    """Open a model that generates images from prompts; ValueError for another one."""
    pipe = open_pipeline(_require_image_model(inspect_model(name), "image_model").folder, device=device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _require_image_model(pipe: Any, name: str) -> VisualPipeline:
    if not isinstance(pipe, VisualPipeline) or pipe.fps is not None or pipe.is_class_conditional:
        raise ValueError(f"{name} must generate images from prompts, got a {type(pipe).__name__}")
    return pipe


def encode_start_image(pipe: CausalVideoPipeline, image: Any, prompt: str | None, seed: int) -> list[Tensor]:
    """Encode the start image of a video to latents; without one, return an empty list.

    If the prompt asks for one of the model's motions, the image is shrunk by the model's `image_scale`, with white around it.

    Args:
        image: as preprocessed by `preprocess_images`; or a pipeline that generates it with `seed`.
        prompt: of the video.
    """
    settings, geometry = pipe.settings, pipe.transformer.geometry
    if image is None:
        return []
    if not settings.image:
        raise ValueError("image must be left out: this model was not trained to start from one frame")
    still = None if prompt is None else remove_motion(prompt, settings.motions)
    if isinstance(image, VisualPipeline):
        if prompt is None:
            raise ValueError("image must be an image if there is no prompt to generate it from")
        scorer = pipe.resolve_frame_scorer().scorer if settings.image_candidates > 1 else None
        image = _require_image_model(image, "image")(
            pipe.scorer_prompt(still or prompt),
            generator=torch.Generator().manual_seed(seed),
            num_candidates=settings.image_candidates,
            scorer=scorer,
        ).images
    pixels = preprocess_images(image, pipe.image_processor, geometry.pixel_size, "image")
    if len(pixels) != 1:
        raise ValueError(f"image must be one image, got {len(pixels)}")
    if still is not None and settings.image_scale < 1:
        rows, columns = pixels.shape[2:]
        size = [max(1, round(settings.image_scale * side)) for side in (rows, columns)]
        small = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        y, x = rows - size[0], columns - size[1]
        pixels = F.pad(small, (x // 2, x - x // 2, y // 2, y - y // 2), value=1.0)
    frames = 1 + (settings.image_frames - 1) * geometry.temporal_stride
    return [pipe.block_decoder.encode(pixels[None].repeat(1, frames, 1, 1, 1).to(pipe._device_of(pipe.vae)))]
