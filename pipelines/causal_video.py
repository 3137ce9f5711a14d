"""`CausalVideoPipeline`: text to video, block by block, with a large and a small causal video model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.compat import tokenized, without_autocast
from vargen.convert.causal_video import convert_causal_video
from vargen.decoding import BlockStream, VideoMethod
from vargen.decoding.video.interfaces import BlockProgress, DraftRouter
from vargen.models.causal_video.decoding import BlockRouter, CausalVideoBlockModel
from vargen.models.causal_video.network import CausalVideoLoRA, CausalVideoTransformer
from vargen.models.guidance import Condition, Guidance
from vargen.models.tokenizers.video_vae import (
    AutoencoderKLWan,
    CausalVideoVAE,
    PreviewDecoder,
    StreamingDecoder,
    WanStreamingDecoder,
)
from vargen.pipelines import validation
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.families import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.prompts import NormalizedPrompt, encode_tokens
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.start_images import encode_start_image, open_image_pipe
from vargen.pipelines.video_settings import LATENT_SIZES, LORA_SIZE, VAE_SETTINGS, VideoSettings, validate_geometry
from vargen.pipelines.videos import (
    CausalVideoPipelineOutput,
    collect_blocks,
    drafter_digest,
    save_video,
    stack_videos,
    to_frame_scorer,
)
from vargen.scoring import DEFAULT_SCORER, open_scorer
from vargen.scoring.frames import FrameScorer
from vargen.specs import parse_spec
from vargen.values import require_int, short_repr


class CausalVideoPipeline(VisualPipeline):
    """Text to video, block by block (Huang et al. 2025, Self Forcing), with drafts routed by quality (Hu and Zhang 2026, SDVG).

    Example:
        >>> from vargen import CausalVideoPipeline
        >>> pipe = CausalVideoPipeline.from_pretrained("emoji-video")
        >>> result = pipe("a waving cat", num_blocks=6, generator=torch.Generator().manual_seed(0))
        >>> pipe.save_video(result.frames[0], "cat.mp4")

    Args:
        vae: video VAE with a causal decoder.
        transformer: the large (target) model.
        draft_transformer: a small model with the same latents. Without one, the target drafts with its `draft_steps`, if it has
            such a setting.
        preview_decoder: a cheap decoder for the frames on which drafts are scored.
        router: ranks drafts for `sdvg-learned`; `vargen train router` trains it for this pair of models.
        image_lora, draft_image_lora: LoRA of each model, only for videos that start from an image.
        text_encoder, tokenizer: encoder of prompts.
        defaults: the checkpoint's settings; see `vargen.pipelines.video_settings.VideoSettings`.
        prompt_styles, prompt_names: as in `LlamaGenPipeline`.
    """

    paradigm: ClassVar[str] = VideoMethod.paradigm
    baseline: ClassVar[str] = "target"
    default_method = "sdvg"
    pixel_decoder: ClassVar[str] = "vae"
    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = []
    vocab_size = 0  # a video has no tokens
    fps: Any = property(attrgetter("transformer.geometry.fps"))

    def validate_method(self, method: Any) -> None:
        # A router knows its drafter by the weights, which a pipeline of `inspect_model` does not have.
        router = self._bind_router(method) if self.has_weights else self.router
        method.validate_models(self.decoding_model(), has_scorer=True, has_router=router is not None)

    def _bind_router(self, method: VideoMethod) -> DraftRouter | None:
        """Return the router for a method; None if the method needs none, or there is none."""
        if self.router is None or not method.policy.needs_router:
            return None
        self.router.validate_drafter(drafter_digest(self, method.exit_step), method.exit_step)
        return self.router.rank

    @property
    def max_caption_tokens(self) -> int:
        return int(self.transformer.config.text_len or self.settings.caption_rows)

    @property
    def settings(self) -> VideoSettings:
        """The checkpoint's settings."""
        return VideoSettings.read(self.config.defaults)

    def setting(self, name: str) -> Any:
        """Return one of the `settings` by name."""
        return getattr(self.settings, name)

    @property
    def num_tokens(self) -> int:
        """Number of frames of a video of default length."""
        geometry = self.transformer.geometry
        return geometry.pixel_frames(0, self.settings.num_blocks * geometry.block_frames)

    @property
    def num_baseline_passes(self) -> int:
        """Number of passes of the baseline for a video of default length."""
        return self.settings.num_blocks * (len(self.settings.resolve_levels()) + 1) - 1

    @property
    def image_size(self) -> int:
        return self.transformer.geometry.pixel_size[0]

    @property
    def block_decoder(self) -> Any:
        """Decodes latents block by block, and encodes start images."""
        return self.vae if isinstance(self.vae, StreamingDecoder) else WanStreamingDecoder(self.vae)

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
        preview_decoder: Any = None,
        window: int | None = None,
        sinks: int | None = None,
        motion: int | None = None,
        generator: torch.Generator | None = None,
        prompt_embeds: Tensor | None = None,
        callback: Callable[[BlockProgress], bool | None] | None = None,
        profile: bool = False,
    ) -> BlockStream:
        """Return an iterator over the blocks of a video, each of which is generated on demand.

        Its `change_prompt` continues with another prompt: `stream.change_prompt(pipe.encode_video_condition("a dog"))`.

        Args:
            prompt: text of the video. Only one; `__call__` accepts several.
            image: start image: a PIL image, or a tensor `[1, 3, Y, X]`, float in [0, 1] or uint8. It is resized, and
                the video begins with it. Or a pipeline of an image model, or the name of one that is packaged: it generates the
                image from the prompt without its motion, in the model's style if it has only one, with the seed of the video.
                None: the image model that the checkpoint names, if there is a prompt. False: none.
            num_blocks: length in blocks. None: the checkpoint's default.
            accelerator: name of a preset (`vargen info presets` lists them), or a `VideoMethod`. None: `"sdvg"`, or `"target"`
                for a model without a draft transformer, or see `resolve_method`.
            tau: acceptance threshold on the scorer's scale, for methods that have one. None: the checkpoint's or the method's.
            scorer: scorer of drafts, for methods that score; see `resolve_frame_scorer`.
            preview_decoder: decoder of the frames that are scored: an object with `decode_block`; see
                `vargen.models.tokenizers.video_vae.StreamingDecoder`. None: the model's, if any.
            window, sinks: maximum number of latent frames that a block attends to, and how many of them are the first frames
                of the video. None: the checkpoint's default; without a window a block attends to all frames.
            motion: motion level, for models trained with motion levels.
            generator: source of all noise.
            prompt_embeds: text features `[1, P, text_dim]` instead of a prompt; not for methods that score.
            callback: called with a `BlockProgress` after every pass; returning False ends the video.
            profile: see `BlockStream`.
        """
        self.check_inputs()
        given: dict[str, Any] = {"num_blocks": num_blocks, "window": window, "sinks": sinks}
        settings = replace(self.settings, **{name: value for name, value in given.items() if value is not None})
        if image is None and prompt is not None:
            image = settings.image_model
        image = None if image is False else image
        method = self.resolve_method(accelerator, tau, image is not None)
        if motion is not None and not (levels := self.transformer.config.motion_levels):
            raise ValueError(f"motion must be left out: this model has no motion levels, got {short_repr(motion)}")
        if motion is not None:
            require_int("motion", motion, 0, levels - 1)
        if preview_decoder is not None and (isinstance(preview_decoder, type) or not hasattr(preview_decoder, "decode_block")):
            raise TypeError(f"preview_decoder must be an object with decode_block, got {short_repr(preview_decoder)}")
        if window is not None:
            require_int("window", window, self.transformer.geometry.block_frames + (sinks or 0))
        condition = self.encode_video_condition(prompt, prompt_embeds)
        if method.policy.needs_scores and prompt is None:
            raise ValueError(f"accelerator {method.name!r} scores drafts with the prompt: give prompt, not prompt_embeds")
        frame_scorer = self.resolve_frame_scorer(scorer) if method.policy.needs_scores or scorer is not None else None
        seeds = resolve_seeds(generator, 1)
        if isinstance(image, str):
            image = self.named_image_pipe(image)
        started = time.perf_counter()
        start = encode_start_image(self, image, prompt, seeds.seeds[0])
        seconds = time.perf_counter() - started
        stream = BlockStream(
            self.decoding_model(settings, motion, bool(start)),
            condition,
            int(seeds.noise_seeds[0]),
            method,
            blocks=settings.num_blocks,
            decoder=self.block_decoder,
            preview=self.preview_decoder if preview_decoder is None else preview_decoder,
            score=frame_scorer.bind(self.scorer_prompt(str(prompt))) if frame_scorer and method.policy.needs_scores else None,
            given=start,
            callback=callback,
            profile=profile,
            router=self._bind_router(method),
        )
        stream.stats.seed, stream.stats.seconds = seeds.seeds[0], seconds if start else 0.0
        return stream

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
        """Generate a video, or one per prompt of a list, one by one.

        Args:
            prompt, generator: one, or a list with one per video; a single generator is the source of all noise in turn.
            **options: arguments of `stream`, which apply to every video.
            output_type, return_dict: as of image pipelines.
            callback_on_step_end: called as `f(pipe, passes, block, {})` after every pass. Returning `{"stop": True}` ends the
                call with the blocks finished so far; later videos have none.

        Raises:
            NonFiniteLatentsError: see `decode_video`.
        """
        self.check_inputs(output_type, callback_on_step_end, callback_on_step_end_tensor_inputs)
        is_list = isinstance(prompt, list | tuple)
        prompts: list[Any] = validation.validate_prompts(prompt) if is_list else [prompt]
        seeds = resolve_seeds(generator, len(prompts))
        sources = [torch.Generator(device).manual_seed(seed) for seed, device in zip(seeds.seeds, seeds.devices, strict=True)]
        videos: list[list[Tensor]] = []
        with self._start_call() as call:

            def after_pass(progress: BlockProgress) -> bool:
                if callback_on_step_end is not None:
                    answer = callback_on_step_end(self, progress.passes - 1, progress.block, {})
                    call.interrupted |= validation.wants_stop(answer)
                return not call.interrupted

            # Streams are lazy, so all prompts are validated and encoded before the first video is started.
            streams = [
                self.stream(each, generator=source, callback=after_pass, **options)
                for each, source in zip(prompts, sources, strict=True)
            ]
            with self.progress_bar(total=sum(stream.blocks for stream in streams)) as bar:
                for stream in streams:
                    if call.interrupted:
                        stream.cancel()
                    videos.append(collect_blocks(stream, output_type, bar.update))
        self.maybe_free_model_hooks()
        stats = [stream.stats for stream in streams]
        frames = stack_videos(videos, output_type)
        if self.summary is not None:
            for each in stats:
                self.summary.add(each)
        result = CausalVideoPipelineOutput(frames=frames, stats=stats if is_list else stats[0], fps=self.fps)
        return result if return_dict else (frames,)

    def save_video(self, frames: Any, path: Any, fps: int | None = None) -> Path:
        """Write frames atomically to an .mp4, .gif or .webp file; see `vargen.pipelines.videos.save_video`."""
        return save_video(frames, path, self.fps if fps is None else fps)

    def decoding_model(
        self, settings: VideoSettings | None = None, motion: int | None = None, from_image: bool = False
    ) -> CausalVideoBlockModel:
        """Return the adapter of both models, with their LoRAs for a video that starts from an image."""
        settings = settings or self.settings
        options: dict[str, Any] = {
            "resamples_noise": not settings.euler,
            "guidance": Guidance(settings.guidance, negative=None if settings.guidance == 1 else self.encode_empty_caption()),
            "window": settings.window,
            "sinks": settings.sinks,
            "motion": motion,
            "device": self._device_of(self.transformer),
        }
        levels, draft_levels = (settings.resolve_levels(draft) for draft in (False, True))
        target, drafter = self.transformer, self.draft_transformer
        if from_image:
            target = self._merge_lora("transformer", "image_lora")
            drafter = self._merge_lora("draft_transformer", "draft_image_lora")
        drafts = drafter is not None or settings.draft_steps is not None
        draft = CausalVideoBlockModel(drafter or target, draft_levels, **options) if drafts else None
        return CausalVideoBlockModel(target, levels, draft_model=draft, **options)

    def _merge_lora(self, name: str, lora_name: str) -> Any:
        """Return a network with its LoRA, if any, merged in; kept until either is another one."""
        network, lora, device = getattr(self, name), getattr(self, lora_name), self._device_of(self.transformer)
        if network is None or lora is None:
            return network
        *parts, merged = self._opened.get(name, (None, None, None))
        if parts != [network, lora] or (merged.dtype, merged.device) != (network.dtype, device):
            merged = lora.merge(network).to(device)
            self._opened[name] = network, lora, merged
        return merged

    def normalize_prompt(self, prompt: str) -> NormalizedPrompt:
        """As in `VisualPipeline`, of a prompt cleaned as the text encoder was trained."""
        return super().normalize_prompt(self.settings.clean(prompt))

    def encode_video_condition(self, prompt: Any, prompt_embeds: Any = None) -> Condition:
        """Return the condition of one video."""
        if prompt_embeds is not None:
            width = self.transformer.config.text_dim
            if prompt is not None or not isinstance(prompt_embeds, Tensor) or prompt_embeds.shape[::2] != (1, width):
                raise ValueError(f"prompt_embeds must be a tensor [1, P, {width}] and come without prompt")
            return Condition(caption_embeds=prompt_embeds.to(self._execution_device))
        if len(prompts := validation.validate_prompts(prompt)) != 1:
            raise ValueError(f"prompt must be one for a video, got {len(prompts)}")
        embeds, mask = self.encode_prompt(prompts)
        return Condition(caption_embeds=embeds[:, mask[0]], caption_mask=mask[:, mask[0]])

    def encode_empty_caption(self) -> Condition:
        """Return the null condition: features of an empty caption, as in training with caption dropout."""
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("this pipeline was loaded without a text encoder, which guidance needs")
        return Condition(caption_embeds=encode_tokens(self, tokenized(self.tokenizer, [""], return_tensors="pt"))[0])

    def scorer_prompt(self, prompt: str) -> str:
        """Return the prompt for scorers, in the model's only style, or they would prefer a mixture."""
        text = self.normalize_prompt(prompt).text
        styles = list(self.config.prompt_styles or ())
        named = len(styles) != 1 or re.search(rf"\b{re.escape(styles[0])}\b", text, re.IGNORECASE)
        return text if named else f"{text}, {styles[0]} style"

    def resolve_frame_scorer(self, scorer: Any = None) -> Any:
        """Return the scorer of drafts.

        Args:
            scorer: a name that `vargen eval` accepts, a `Scorer`, a function of images and prompts, or an object whose
                `bind(prompt)` returns a function of a `BlockView`, such as a `FrameScorer`. None: the packaged scorer. Image
                scorers get the checkpoint's `scored_frames` of each block.
        """
        if scorer is None or isinstance(scorer, str):
            scorer = FrameScorer(self.open_once(open_scorer, scorer or DEFAULT_SCORER), frames=self.settings.scored_frames)
        return to_frame_scorer(scorer, self.settings.scored_frames)

    def named_image_pipe(self, name: str) -> Any:
        """Return the pipeline of a packaged image model, or of one in a folder, opened on first use."""
        return self.open_once(open_image_pipe, name)

    def resolve_method(self, accelerator: Any, tau: Any = None, from_image: bool = False) -> VideoMethod:
        """Return the method of a call with its threshold.

        Args:
            from_image: whether the video starts from an image. If only the transformer has a LoRA for it, the draft transformer
                does not move the image as the prompt says, and the default is `"target"`.
        """
        if accelerator is None:
            drafter, loras = self.draft_transformer, (self.image_lora, self.draft_image_lora)
            is_still = from_image and drafter is not None and loras[0] is not None and loras[1] is None
            drafts = not is_still and (drafter is not None or self.settings.draft_steps is not None)
            accelerator = self.default_method if drafts else self.baseline
        method = super().resolve_method(accelerator)
        says_tau = not isinstance(accelerator, str) or "tau" in parse_spec(accelerator)[1]
        if tau is None and method.threshold is not None and not says_tau:
            tau = self.settings.tau
        return method if tau is None else method.with_tau(tau)


CAUSAL_VIDEO = register_family(
    ModelFamily(
        name="causal-video",
        pipeline=CausalVideoPipeline,
        components={
            "vae": Component(
                (CausalVideoVAE, AutoencoderKLWan),
                required=True,
                follows_dtype=("AutoencoderKLWan",),
                matches=VAE_SETTINGS,
            ),
            "transformer": Component((CausalVideoTransformer,), required=True, follows_dtype=True),
            **TEXT_COMPONENTS,
            "draft_transformer": Component(
                (CausalVideoTransformer,), follows_dtype=True, matches=("text_dim", "motion_levels", *LATENT_SIZES)
            ),
            "preview_decoder": Component((PreviewDecoder,), matches={"latent_channels": "channels"}),
            "router": Component((BlockRouter,), matches=("channels",), run_folder="router"),
            "image_lora": Component((CausalVideoLoRA,), matches=LORA_SIZE),
            "draft_image_lora": Component((CausalVideoLoRA,)),
        },
        text_width="text_dim",
        check_compatible=validate_geometry,
        check_defaults=VideoSettings.read,
        convert=convert_causal_video,
    )
)
