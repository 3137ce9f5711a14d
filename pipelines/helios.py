"""`HeliosVideoPipeline`: two pipelines of diffusers' Helios as target and drafter of a video, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.compat import installed_version, without_autocast
from vargen.decoding import BlockStream, VideoMethod, resolve_method
from vargen.decoding.video.interfaces import BlockProgress
from vargen.models.helios import (
    SHARED_OPTIONS,
    HeliosBlockModel,
    HeliosDecoder,
    HeliosPrompt,
    count_blocks,
    default_options,
    draft_noise,
    encode_helios_prompt,
)
from vargen.pipelines import validation
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.videos import CausalVideoPipelineOutput, collect_blocks, save_video, stack_videos, to_frame_scorer
from vargen.scoring import open_scorer
from vargen.values import require_int, short_repr

from diffusers import HeliosPipeline, HeliosPyramidPipeline  # isort: skip  (after the torchvision guard)

NUM_FRAMES = 132  # the default of diffusers
# Arguments of calls of a distilled drafter, as in the documentation of diffusers. Its call would use guidance, which it lacks.
DISTILLED: dict[str, Any] = {
    "guidance_scale": 1.0, "pyramid_num_inference_steps_list": [2, 2, 2], "is_amplify_first_chunk": True
}  # fmt: skip
# Parts that target and drafter must have in common, for latents and prompts cross between them.
_COMMON = {
    "transformer": ("in_channels", "text_dim"),
    "vae": ("scale_factor_spatial", "scale_factor_temporal", "latents_mean", "latents_std"),
}


class HeliosVideoPipeline:
    """Text to video with Helios in diffusers (Yuan et al. 2026, arXiv:2603.04379), by any video method without a router.

    Each chunk of latents is a block. `"target"` gives the video that `target` itself gives for the same arguments, bit for bit
    if the VAE is in float32. Both pipelines stay as they are, and where they are.

    Example:
        >>> pipe = vargen.accelerate(base, draft_model=distilled)  # two pipelines of diffusers
        >>> result = pipe("a tropical fish", accelerator="sdvg", scorer="image-reward", num_frames=132)
        >>> pipe.save_video(result.frames[0], "fish.mp4")

    Args:
        target: a `HeliosPipeline` (Helios-Base) or `HeliosPyramidPipeline` (Helios-Mid). Its text encoder encodes all prompts,
            and its VAE decodes all blocks.
        drafter: the same, usually Helios-Distilled, which may be loaded without a text encoder; None: only `"target"` runs.

    Raises:
        TypeError: for an object of another class.
        ValueError: for a pipeline that lacks a part, or a drafter with other latents or features of prompts.
    """

    fps = 24

    def __init__(self, target: Any, drafter: Any = None):
        for name, pipe in (("model", target), ("draft_model", drafter)):
            if pipe is None and name == "draft_model":
                continue
            if not isinstance(pipe, HeliosPipeline | HeliosPyramidPipeline):
                kind = type(pipe).__name__
                raise TypeError(f"{name} must be a HeliosPipeline or HeliosPyramidPipeline of diffusers, got {kind}")
            needed = ("transformer", "vae", "scheduler", *(("text_encoder", "tokenizer") if pipe is target else ()))
            for part in needed:
                if getattr(pipe, part) is None:
                    raise ValueError(f"{name} must have a {part}, and was loaded without one")
        for part, names in _COMMON.items() if drafter is not None else ():
            for name in names:
                own, other = (getattr(pipe, part).config[name] for pipe in (target, drafter))
                if np.any(np.asarray(own) != np.asarray(other)):  # of lists and tuples alike
                    raise ValueError(
                        f"draft_model must have the target's {name} of the {part}, {short_repr(own)}, got {short_repr(other)}"
                    )
        self.target, self.drafter = target, drafter
        self._scorers: dict[str, Any] = {}

    @torch.no_grad()
    @without_autocast
    def stream(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        image: Any = None,
        num_frames: int = NUM_FRAMES,
        accelerator: str | VideoMethod | None = None,
        tau: float | None = None,
        scorer: Any = None,
        generator: torch.Generator | None = None,
        draft_options: Mapping[str, Any] | None = None,
        max_sequence_length: int = 512,
        callback: Callable[[BlockProgress], bool | None] | None = None,
        profile: bool = False,
        **options: Any,
    ) -> BlockStream:
        """Return an iterator over the blocks of a video, each of which is generated on demand.

        Its `change_prompt` continues with another prompt: `stream.change_prompt(pipe.encode_video_condition("a dog"))`.

        Args:
            prompt, negative_prompt, max_sequence_length: as of the target's call; the drafter gets the same features.
            image: start image: a PIL image, or a tensor `[1, 3, Y, X]`, float in [0, 1]. It is resized.
            num_frames: rounded up to whole chunks, of which the last one is cut as diffusers does: 129 frames for 132.
            accelerator: `"target"`, `"sdvg"`, `"stride"`, or a `VideoMethod`. None: `"sdvg"`, or `"target"` without a drafter.
            tau: acceptance threshold on the scorer's scale. None: the method's.
            scorer: scores drafts; a method that needs one has no default. See `CausalVideoPipeline.resolve_frame_scorer`.
            generator: noise of the target, which consumes it block by block, as its own call does; a draft consumes nothing. So
                the noise of a block depends on how many blocks the target generated before. Drafts have noise of their own,
                which depends on the state of the generator here and the number of the block. None: a new one. `stats.seed` is
                its seed if it was unused, and then gives the video again.
            draft_options: options of the drafter, such as `guidance_scale`. Default: diffusers', or, for a distilled drafter,
                no guidance and [2, 2, 2] steps.
            callback: called with a `BlockProgress` after every step; returning False ends the video. Passes are calls of the
                transformer, two per step with guidance.
            profile: see `BlockStream`.
            **options: of the target's call: `height`, `width`, `history_sizes` and `num_latent_frames_per_chunk`, which the
                drafter shares, and `num_inference_steps`, `guidance_scale` and others of its class.

        Raises:
            TypeError, ValueError: for bad input, before anything is generated.
        """
        method = self.resolve_method(accelerator, tau, scorer is not None)
        num_frames = require_int("num_frames", num_frames, 1)
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator or None, got {short_repr(type(generator).__name__)}")
        if not _is_image(image):
            raise TypeError(f"image must be a PIL image, a tensor [1, 3, Y, X] or None, got {short_repr(image)}")
        seeds = resolve_seeds(generator and generator.clone_state(), 1)  # a copy: the target consumes the generator
        source = torch.Generator().manual_seed(seeds.seeds[0]) if generator is None else generator
        target = HeliosBlockModel(self.target, self._resolve_options(self.target, options), lambda block: source)
        draft_chosen = self._resolve_draft_options(options, draft_options)
        if self.drafter is not None:
            target.draft_model = HeliosBlockModel(self.drafter, draft_chosen, draft_noise(int(seeds.noise_seeds[0])))
        method.validate_models(target, has_scorer=scorer is not None)
        frame_scorer = self._open_scorer(scorer) if method.policy.needs_scores else None
        condition = self.encode_video_condition(prompt, negative_prompt, max_sequence_length)
        blocks = count_blocks(self.target, num_frames, target.block_shape[0])
        stream = BlockStream(
            target,
            condition,
            int(seeds.noise_seeds[0]),
            method,
            blocks=blocks,
            decoder=HeliosDecoder(self.target, blocks),
            score=frame_scorer.bind(prompt) if frame_scorer else None,
            callback=callback,
            profile=profile,
        )
        stream.stats.seed = seeds.seeds[0]
        if image is not None:
            started = time.perf_counter()
            target.begin_with(image, source)
            stream.stats.seconds = time.perf_counter() - started
        return stream

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str,
        *,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        **options: Any,
    ) -> CausalVideoPipelineOutput | tuple[Any]:
        """Generate a video.

        Args:
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for latents `[1, F, C, Y, X]`.
            callback_on_step_end: called as `f(pipe, passes, block, {})` after every step. Returning `{"stop": True}` ends the
                call with the blocks finished so far.
            **options: arguments of `stream`.

        Returns:
            `CausalVideoPipelineOutput` with one video, or its frames if not `return_dict`.
        """
        if output_type not in validation.OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(validation.OUTPUT_TYPES)}, got {short_repr(output_type)}")
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise TypeError(f"callback_on_step_end must be a function, or None, got {short_repr(callback_on_step_end)}")

        def after_step(progress: BlockProgress) -> bool:
            answer = callback_on_step_end and callback_on_step_end(self, progress.passes - 1, progress.block, {})
            return not validation.wants_stop(answer)

        stream = self.stream(prompt, callback=after_step, **options)
        frames = stack_videos([collect_blocks(stream, output_type)], output_type)
        for pipe in (self.target, self.drafter):
            if pipe is not None:
                pipe.maybe_free_model_hooks()
        result = CausalVideoPipelineOutput(frames=frames, stats=stream.stats, fps=self.fps)
        return result if return_dict else (frames,)

    def save_video(self, frames: Any, path: Any, fps: int | None = None) -> Path:
        """Write frames atomically to an .mp4, .gif or .webp file; see `vargen.pipelines.videos.save_video`."""
        return save_video(frames, path, self.fps if fps is None else fps)

    def encode_video_condition(
        self, prompt: Any, negative_prompt: str | None = None, max_sequence_length: int = 512
    ) -> HeliosPrompt:
        """Return the condition of one video."""
        if len(prompts := validation.validate_prompts(prompt)) != 1 or not isinstance(prompt, str):
            raise ValueError(f"prompt must be one string for a video, got {short_repr(prompts)}")
        if not isinstance(negative_prompt, str | None):
            raise TypeError(f"negative_prompt must be a string or None, got {short_repr(negative_prompt)}")
        if installed_version("ftfy") is None:
            raise ImportError("Helios in diffusers cleans prompts with a package that is not installed: pip install ftfy")
        return encode_helios_prompt(self.target, prompt, negative_prompt, max_sequence_length)

    def resolve_method(self, accelerator: Any, tau: float | None = None, has_scorer: bool = True) -> VideoMethod:
        """Return the method of a call with its threshold; ValueError for one that cannot run."""
        if accelerator is None:
            accelerator = "target" if self.drafter is None else "sdvg"
        method = resolve_method(accelerator, VideoMethod.paradigm)
        if method.policy.needs_router:
            raise ValueError(f"accelerator {method.name!r} needs a router, and there is none for Helios")
        if method.policy.needs_scores and not has_scorer:
            raise ValueError(f"scorer must be given for accelerator {method.name!r}, such as 'image-reward'")
        return method if tau is None else method.with_tau(tau)

    def _resolve_options(self, pipe: Any, given: Mapping[str, Any], excluded: Sequence[str] = ()) -> dict[str, Any]:
        """Return options of a pipeline's call; TypeError for one that it does not have, or that is excluded."""
        allowed = [name for name in default_options(pipe) if name not in excluded]
        if unknown := [name for name in given if name not in allowed]:
            kind = f"a {type(pipe).__name__} as {'drafter' if excluded else 'target'}"
            raise TypeError(f"{short_repr(unknown[0])} is no option of {kind}, which has {', '.join(allowed)}")
        return dict(given)

    def _resolve_draft_options(self, options: Mapping[str, Any], given: Any) -> dict[str, Any]:
        """Return the options of the drafter's call: its own, and those that it shares with the target."""
        if given is not None and (self.drafter is None or not isinstance(given, Mapping)):
            raise TypeError(f"draft_options must be a dict, or None without a draft_model, got {short_repr(given)}")
        if self.drafter is None:
            return {}
        own = DISTILLED if getattr(self.drafter.config, "is_distilled", False) else {}
        shared = {name: value for name, value in options.items() if name in SHARED_OPTIONS}
        return {**own, **shared, **self._resolve_options(self.drafter, given or {}, SHARED_OPTIONS)}

    def _open_scorer(self, scorer: Any) -> Any:
        if isinstance(scorer, str):
            if scorer not in self._scorers:
                self._scorers[scorer] = open_scorer(scorer, self.target._execution_device)
            scorer = self._scorers[scorer]
        return to_frame_scorer(scorer)


def _is_image(image: Any) -> bool:
    if isinstance(image, Tensor):
        return image.ndim == 4 and image.shape[:2] == (1, 3) and image.is_floating_point()
    return isinstance(image, Image.Image | None)
