"""Video output: the result of a call, and writing MP4, GIF and WebP files atomically."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from vargen.files import atomic_file, expand_user
from vargen.mp4 import Mp4Writer, import_av
from vargen.scoring.frames import FrameScorer
from vargen.values import NumberRange, short_repr
from vargen.weight_files import weights_digest

FORMATS = (".mp4", ".gif", ".webp")
_FPS = NumberRange(0, 1000, open_below=True)


def validate_video_path(path: Any, name: str = "path") -> Path:
    """Validate the path of a video file, and return it."""
    file = expand_user(path, name)
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"{name} must end in one of {', '.join(FORMATS)}, got {short_repr(str(path))}")
    if file.suffix.lower() == ".mp4":
        import_av()
    return file


def save_video(frames: Any, path: Any, fps: float, comment: str = "") -> Path:
    """Write a video file atomically. GIF and WebP files loop, MP4 needs PyAV.

    Args:
        frames: PIL images, or numbers in [0, 1] as a NumPy array `[F, Y, X, 3]` or a torch tensor `[F, 3, Y, X]`.
        path: file name that ends in .mp4, .gif or .webp.
        fps: frames per second.
        comment: stored in the file's metadata if the format supports it.
    """
    file, rate = validate_video_path(path), float(_FPS.check("fps", fps) or 0)
    images = _to_pil_frames(frames)
    kinds: dict[str, Any] = {
        ".gif": {"format": "GIF", "disposal": 2, "comment": comment.encode()[:255] or None},
        ".webp": {"format": "WEBP", "lossless": True},
    }
    with atomic_file(file) as temporary:
        if (options := kinds.get(file.suffix.lower())) is not None:
            options |= {"save_all": True, "append_images": images[1:], "loop": 0, "duration": round(1000 / rate)}
            images[0].save(temporary, **options)
        else:
            writer = Mp4Writer(str(temporary), images[0].size, rate, comment)
            for image in images:
                writer.add(image)
            writer.close()
    return file


def _to_pil_frames(frames: Any) -> list[Image.Image]:
    if isinstance(frames, Tensor) and frames.ndim == 4:
        frames = VaeImageProcessor.pt_to_numpy(frames.detach())
    if isinstance(frames, np.ndarray) and frames.ndim == 4 and frames.shape[-1] == 3:
        if not np.isfinite(frames).all():
            raise ValueError("frames must hold finite numbers from 0 to 1, and hold NaN or infinite ones")
        frames = VaeImageProcessor.numpy_to_pil(frames.clip(0, 1))
    if not isinstance(frames, Sequence) or not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        raise ValueError(f"frames must be PIL images, or numbers [F, Y, X, 3] or [F, 3, Y, X], got {short_repr(frames)}")
    if len({frame.size for frame in frames}) > 1:
        raise ValueError(f"frames must be of one size, got {sorted({frame.size for frame in frames})[:4]}")
    return [frame.convert("RGB") for frame in frames]


@dataclass(repr=False)
class CausalVideoPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        frames: N videos, one per prompt. Depending on `output_type`, lists of PIL images, a float32 NumPy array
            `[N, F, Y, X, 3]` or torch tensor `[N, F, 3, Y, X]` in [0, 1], or latents, float32 `[N, F', C, Y', X']`. If the call
            was stopped, videos differ in length, and arrays are returned as a list.
        stats: statistics of the video, with one row per block; a list of them for a list of prompts. See
            `vargen.decoding.VideoStats`.
        fps: frames per second of the model.
    """

    frames: Any
    stats: Any  # VideoStats | list[VideoStats]; the union would need a check wherever there is one prompt
    fps: int

    def __repr__(self) -> str:
        """One line: the number of videos, and seconds of each."""
        every = self.stats if isinstance(self.stats, list) else [self.stats]
        seconds = ", ".join(f"{each.seconds:.1f} s, seed {each.seed}" for each in every[:4]) + ", ..." * (len(every) > 4)
        return f"<{type(self).__name__}: {len(every)} video{'s' if len(every) != 1 else ''}, {seconds}>"


def to_uint8(frames: Tensor) -> np.ndarray:
    """Return frames `[F, 3, Y, X]`, float in [0, 1], as uint8 `[F, Y, X, 3]` on the CPU."""
    return frames.mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def stack_videos(videos: list[list[Tensor]], output_type: str) -> Any:
    """Join the blocks `[F, ...]` of each video, uint8 for PIL images, in the output type."""
    if output_type == "pil":
        return [[Image.fromarray(frame) for part in parts for frame in part.permute(0, 2, 3, 1).numpy()] for parts in videos]
    whole = [torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32) for parts in videos]
    alike = len({video.shape for video in whole}) == 1  # False if the call was stopped
    if output_type != "np":
        return torch.stack(whole) if alike else whole
    arrays = [(video.permute(0, 2, 3, 1) if video.ndim == 4 else video).cpu().numpy() for video in whole]
    return np.stack(arrays) if alike else arrays


def collect_blocks(stream: Any, output_type: str, after_block: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Generate the blocks of a stream, and return frames or latents of each as `stack_videos` takes them."""
    parts = []
    for block in stream:
        after_block()
        kept = block.latents if output_type == "latent" else block.frames
        parts.append(kept.mul(255).round().byte().cpu() if output_type == "pil" else kept)
    return parts


def to_frame_scorer(scorer: Any, frames: int | None = None) -> Any:
    """Return a scorer of blocks: an object with `bind` as it is, a scorer of images as a `FrameScorer` of `frames` a block."""
    bound = hasattr(scorer, "bind") and not isinstance(scorer, type)
    return scorer if bound else FrameScorer(scorer, frames=frames)


def drafter_digest(pipe: Any, exit_step: int) -> str:
    """Return the digest of the network that makes the drafts, the same in float32 and bfloat16."""
    return weights_digest(pipe.transformer if exit_step else pipe.draft_transformer, dtype=torch.bfloat16)
