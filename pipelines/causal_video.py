"""`CausalVideoPipeline`: text to video, block by block, with a large and a small causal video model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.convert.causal_video import convert_causal_video
from vargen.decoding import VideoBlock, VideoMethod, decode_video
from vargen.decoding.video.request import BlockProgress
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.pipelines import validation as checks
from vargen.pipelines.components import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.prompt_names import PromptNames
from vargen.pipelines.video_call import check_then, check_window
from vargen.pipelines.video_model import VideoModel, check_geometry, check_settings
from vargen.pipelines.videos import CausalVideoPipelineOutput, VideoStream, stack_videos
from vargen.values import parse_int, short_repr

from diffusers.image_processor import VaeImageProcessor  # isort: skip  # after stored, which guards torchvision

MAX_BLOCKS = 100_000


class CausalVideoPipeline(VideoModel):
    """Text to video, block by block (Huang et al. 2025, Self Forcing), with drafts routed by quality (Hu and Zhang 2026, SDVG).

    Example:
        >>> from vargen import CausalVideoPipeline
        >>> pipe = CausalVideoPipeline.from_pretrained("emoji-video")
        >>> result = pipe("a waving cat", num_blocks=6, generator=torch.Generator().manual_seed(0))
        >>> pipe.save_video(result.frames[0], "cat.mp4")

    Args:
        vae: video VAE with a causal decoder.
        transformer: the large (target) model.
        draft_transformer: a small model with the same latents.
        preview_decoder: a cheap decoder for the frames on which drafts are scored.
        text_encoder, tokenizer: encoder of prompts.
        defaults: the checkpoint's `levels` (noise levels of the steps), `euler`, `guidance`, `num_blocks`, `tau`, `window`,
            `sinks`, `caption_rows` and `scored_frames`.
        prompt_styles, prompt_names: as in `LlamaGenPipeline`.

    Raises:
        ValueError: for components that do not match each other, or defaults that are not valid.
    """

    output: ClassVar[Any] = CausalVideoPipelineOutput
    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = []

    def __init__(
        self,
        vae: CausalVideoVAE,
        transformer: CausalVideoTransformer,
        text_encoder: Any = None,
        tokenizer: Any = None,
        draft_transformer: CausalVideoTransformer | None = None,
        preview_decoder: PreviewDecoder | None = None,
        defaults: dict[str, Any] | None = None,
        prompt_styles: list[str] | None = None,
        prompt_names: PromptNames | dict[str, str] | None = None,
    ):
        parts = {
            "vae": vae, "transformer": transformer, "text_encoder": text_encoder, "tokenizer": tokenizer,
            "draft_transformer": draft_transformer, "preview_decoder": preview_decoder,
        }  # fmt: skip
        self._register(parts, {"defaults": defaults, "prompt_styles": prompt_styles}, prompt_names)
        self.image_processor = VaeImageProcessor(vae_scale_factor=8)

    @torch.no_grad()
    @without_autocast
    def stream(
        self,
        prompt: str | None = None,
        *,
        image: Any = None,
        num_blocks: int | None = None,
        accelerator: str | VideoMethod | None = None,
        tau: float | None = None,
        scorer: Any = None,
        then: Mapping[int, str] | None = None,
        window: int | None = None,
        sinks: int | None = None,
        motion: int | None = None,
        generator: torch.Generator | None = None,
        prompt_embeds: Tensor | None = None,
        callback: Callable[[BlockProgress], bool | None] | None = None,
        clean_prompt: bool = False,
        profile: bool = False,
    ) -> VideoStream:
        """Return an iterator over the blocks of a video, each of which is generated on demand.

        Args:
            prompt: text of the video. Only one; `__call__` accepts several.
            image: start image: a PIL image, or a tensor `[1, 3, Y, X]`, float in [0, 1] or uint8. It is resized. Its frame is
                not part of the result.
            num_blocks: length in blocks. None: the checkpoint's default.
            accelerator: name of a preset (`vargen info presets` lists them), or a `VideoMethod`. None: `"sdvg"`, or `"target"`
                for a model without a draft transformer.
            tau: acceptance threshold on the scorer's scale, for methods that have one. None: the checkpoint's, else the
                method's.
            scorer: scorer of drafts, for methods that score; see `frame_scorer`.
            then: further prompts, by the number (above 0) of the block from which on each applies.
            window, sinks: maximum number of latent frames that a block attends to, and how many of them are the first frames
                of the video. None: the checkpoint's default; without a window a block attends to all frames.
            motion: motion level, for models trained with motion levels.
            generator: source of all noise.
            prompt_embeds: text features `[1, P, text_dim]` instead of a prompt; not for methods that score.
            callback: called with a `BlockProgress` after every pass; returning False ends the video.
            clean_prompt: see `LlamaGenPipeline`.
            profile: see `decode_video`.

        Raises:
            ValueError, TypeError: before any pass, for invalid arguments, naming the argument, its value and what is allowed.
        """
        if self.transformer is None or self.vae is None:
            raise ValueError("this pipeline was loaded without a transformer or vae: it only encodes prompts")
        blocks = self.default("num_blocks") if num_blocks is None else parse_int(num_blocks, 1, MAX_BLOCKS)
        if blocks is None:
            raise ValueError(f"num_blocks must be a whole number from 1 to {MAX_BLOCKS}, got {short_repr(num_blocks)}")
        method = self.chosen(accelerator, tau)
        levels = self.transformer.config.motion_levels
        if motion is not None and parse_int(motion, 0, levels - 1) is None:
            known = f"from 0 to {levels - 1}" if levels else "left out: this model knows no levels"
            raise ValueError(f"motion must be {known}, got {short_repr(motion)}")
        check_window(window, sinks, self.transformer.geometry.block_frames)
        later = check_then(then, blocks)
        scored = method.needs_scorer
        if prompt is None and prompt_embeds is None:
            raise ValueError("give a prompt, for example pipe('a waving cat')")
        if scored and prompt is None:
            raise ValueError(f"accelerator {method.name!r} scores drafts with the prompt: give prompt, not prompt_embeds")
        seeds = checks.resolve_seeds(generator, 1)
        condition = self.video_condition(prompt, prompt_embeds, clean_prompt)
        judge = self.frame_scorer(scorer) if scored else None
        made = decode_video(
            self.block_model(window, sinks, motion),
            condition,
            int(seeds.noise[0]),
            method,
            blocks=blocks,
            decoder=self._decoder(),
            preview=self.preview_decoder,
            score=None if judge is None else judge.bind(self.scored_prompt(str(prompt))),
            given=self._given(image),
            callback=callback,
            profile=profile,
        )
        made.stats.seed = seeds.asked[0]
        return VideoStream(self, made, judge, later, clean_prompt)

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **options: Any,
    ) -> CausalVideoPipelineOutput | tuple[Any]:
        """Generate a video, or one per prompt of a list, one by one: memory does not grow with the length of the list.

        Args:
            prompt: text of the video, or a list with one text per video.
            generator: source of all noise: one generator for all videos in turn, or a list with one per video.
            **options: arguments of `stream`, which apply to every video.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"`.
            return_dict: False returns `(frames,)`.
            callback_on_step_end: called as `f(pipe, passes, block, {})` after every pass. Returning `{"stop": True}` ends the
                call with the blocks finished so far; later videos have none.

        Raises:
            ValueError, TypeError: as `stream`, before the first video is started.
            NonFiniteLatentsError: see `decode_video`.
        """
        checks.check_output_type(output_type)
        checks.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        several = isinstance(prompt, list | tuple)
        prompts: list[Any] = checks.check_prompts(prompt) if several else [prompt]
        seeds = checks.resolve_seeds(generator, len(prompts))
        own, stopped = options.pop("callback", None), False

        def callback(progress: BlockProgress) -> bool | None:
            nonlocal stopped
            stopped = own is not None and own(progress) is False
            if not stopped and callback_on_step_end is not None:
                answer = callback_on_step_end(self, progress.passes - 1, progress.block, {})
                stopped = bool((answer or {}).get("stop", False))
            return not stopped

        sources = [torch.Generator(device).manual_seed(seed) for seed, device in zip(seeds.asked, seeds.devices, strict=True)]
        # Streams are lazy, so all prompts are validated and encoded before the first video is started.
        streams = [
            self.stream(each, generator=source, callback=callback, **options)
            for each, source in zip(prompts, sources, strict=True)
        ]
        made: list[list[Tensor]] = []
        with self.progress_bar(total=sum(stream.blocks for stream in streams)) as bar:
            for stream in streams:
                made.append([])
                if stopped:
                    stream.cancel()
                for block in stream:
                    bar.update(1)
                    made[-1].append(_plain(block, output_type))
        self.maybe_free_model_hooks()
        frames, told = stack_videos(made, output_type), [stream.stats for stream in streams]
        if not return_dict:
            return (frames,)
        return CausalVideoPipelineOutput(frames=frames, stats=told if several else told[0], fps=self.fps)

    def save_video(self, frames: Any, path: Any, fps: int | None = None) -> Path:
        """Write frames atomically to an .mp4, .gif or .webp file; see `vargen.pipelines.videos.save_video`."""
        from vargen.pipelines.videos import save_video

        return save_video(frames, path, self.fps if fps is None else fps)


def _plain(block: VideoBlock, output_type: str) -> Tensor:
    """Return the part of a block that is kept until the video is complete."""
    if output_type == "latent":
        return block.latents
    return block.frames.mul(255).round().byte().cpu() if output_type == "pil" else block.frames


CAUSAL_VIDEO = register_family(
    ModelFamily(
        name="causal-video",
        pipeline=CausalVideoPipeline,
        components={
            "transformer": Component((CausalVideoTransformer,), required=True, follows_dtype=True),
            "vae": Component((CausalVideoVAE,), required=True, matches={"latent_channels": "channels"}),
            "draft_transformer": Component(
                (CausalVideoTransformer,), follows_dtype=True, matches=("text_dim", "motion_levels")
            ),
            "preview_decoder": Component((PreviewDecoder,), matches={"latent_channels": "channels"}),
            **TEXT_COMPONENTS,
        },
        text_width="text_dim",
        check_compatible=check_geometry,
        check_defaults=check_settings,
        convert=convert_causal_video,
    )
)
