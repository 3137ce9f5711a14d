"""Start images of videos: given ones, or ones that an image model generates from the prompt without its motion.

Of several candidates, if the video model's settings ask for them, the one that the video's scorer prefers is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import VideoMethod
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.images import preprocess_images
from vargen.pipelines.loading import inspect_model, open_pipeline
from vargen.pipelines.videos import streaming_decoder

if TYPE_CHECKING:
    from vargen.pipelines.causal_video import CausalVideoPipeline

_ADVERB = r"\w+ly"  # as in "quickly bouncing"
_PREPOSITION = r"(?:on|in|at|to|into|from|over|under|with)\b"  # what is left of "rolling on the floor" names no object


def remove_motion(prompt: str, motions: Sequence[str]) -> str | None:
    """Return a prompt without its motion, such as "a pizza" for "a quickly bouncing pizza" or "a pizza that bounces".

    The result is None if it has none of `motions`, phrases such as "bouncing" and "bounces", or names nothing else.
    """
    phrases = "|".join(re.escape(each) for each in sorted(motions, key=len, reverse=True))
    pattern = rf"(?:\b(?:that|which)\s+)?(?:\b{_ADVERB}\s+)?\b(?:{phrases})\b(?:\s+{_ADVERB}\b)?"
    rest, count = re.subn(pattern, " ", prompt, flags=re.IGNORECASE) if motions else (prompt, 0)
    still = re.sub(r"\s+(?=[\s,.!?]|$)", "", rest).strip(" ,.!?")
    names_object = re.sub(r"\b(?:an?|the)\b", "", still).strip() and not re.match(_PREPOSITION, still, flags=re.IGNORECASE)
    return still if count and names_object else None


def find_image_model(pipe: Any, name: str | None = None) -> VisualPipeline | None:
    """Return the pipeline, without weights, of the image model that generates start images; None if there is none.

    Args:
        pipe: of the videos. name: a packaged model or a folder; None for the one in the model's settings, `"none"` for none.
    """
    chosen = pipe.settings.image_model if name is None else name
    if chosen in (None, "none"):
        return None
    if not pipe.settings.image:
        raise ValueError(f"image_model must be left out: {pipe.folder.name} was not trained to start from an image")
    return _inspect(chosen)


def _inspect(name: str) -> VisualPipeline:
    found = inspect_model(name)
    if found.fps is not None or found.is_class_conditional:
        raise ValueError(f"image_model must generate images from prompts, got {name}")
    return found


def open_image_pipe(name: str, device: torch.device) -> VisualPipeline:
    """Open a model that generates images from prompts; ValueError for another one."""
    pipe = open_pipeline(_inspect(name).folder, device=device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def merge_lora(pipe: CausalVideoPipeline, name: str, lora_name: str) -> Any:
    """Return a network of a pipeline with a LoRA merged in, on the device of the passes; the network if there is no LoRA.

    It is kept until the network or the LoRA is another one.
    """
    network, lora, device = getattr(pipe, name), getattr(pipe, lora_name), pipe._device_of(pipe.transformer)
    if network is None or lora is None:
        return network
    *parts, merged = pipe._opened.get(name, (None, None, None))
    if parts != [network, lora] or (merged.dtype, merged.device) != (network.dtype, device):
        merged = lora.merge(network).to(device)
        pipe._opened[name] = network, lora, merged
    return merged


def shrink_images(pixels_BCYX: Tensor, scale: float) -> Tensor:
    """Shrink images in [-1, 1] to a fraction of their size, in the middle of white ones of their former size."""
    Y, X = pixels_BCYX.shape[2:]
    y, x = max(1, round(scale * Y)), max(1, round(scale * X))
    small = F.interpolate(pixels_BCYX, (y, x), mode="bilinear", antialias=True)
    top, left = (Y - y) // 2, (X - x) // 2
    return F.pad(small, (left, X - x - left, top, Y - y - top), value=1.0)


def encode_start_image(pipe: CausalVideoPipeline, image: Any, prompt: str | None, seed: int) -> list[Tensor]:
    """Encode the start image of a video to latents; without one, return an empty list.

    If the prompt asks for one of the model's motions, the image is shrunk by the model's `image_scale`.

    Args:
        image: as preprocessed by `preprocess_images`; or a pipeline that generates it with `seed`, or the name of its model.
        prompt: of the video.
    """
    if image is None:
        return []
    if not pipe.settings.image:
        raise ValueError("image must be left out: this model was not trained to start from one frame")
    if isinstance(image, str):
        image = pipe.named_image_pipe(image)
    still = None if prompt is None else remove_motion(prompt, pipe.settings.motions)
    if isinstance(image, VisualPipeline):
        image = _generate(image, pipe, still or prompt, seed)
    pixels = preprocess_images(image, pipe.image_processor, pipe.transformer.geometry.pixel_size, "image")
    if len(pixels) != 1:
        raise ValueError(f"image must be one image, got {len(pixels)}")
    if still is not None and (scale := pipe.settings.image_scale) < 1:
        pixels = shrink_images(pixels, scale)
    decoder: Any = streaming_decoder(pipe.vae)
    frames = 1 + (pipe.settings.image_frames - 1) * pipe.transformer.geometry.temporal_stride
    return [decoder.encode(pixels[None].repeat(1, frames, 1, 1, 1).to(pipe._device_of(pipe.vae)))]


def _generate(image_pipe: VisualPipeline, pipe: CausalVideoPipeline, prompt: str | None, seed: int) -> Any:
    if image_pipe.paradigm == VideoMethod.paradigm or image_pipe.is_class_conditional or prompt is None:
        raise ValueError(f"image must be an image, or a pipeline of images for a prompt; got {type(image_pipe).__name__}")
    still = pipe.scorer_prompt(prompt)
    candidates = pipe.settings.image_candidates
    scorer = pipe.resolve_frame_scorer().scorer if candidates > 1 else None
    generator = torch.Generator().manual_seed(seed)
    return image_pipe(still, generator=generator, num_candidates=candidates, scorer=scorer).images[0]
