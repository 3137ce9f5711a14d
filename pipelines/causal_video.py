"""`CausalVideoPipeline`: a prompt to a video, block by block, with a large and a small causal video model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.compat import outside_autocast
from vargen.decoding import Block, BlockStats, BlockStream, Routing, decode_blocks
from vargen.decoding.blocks import Progress
from vargen.decoding.flow import warped_levels
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.condition import Condition
from vargen.models.video_preview import PreviewDecoder
from vargen.models.video_stream import StreamDecoder
from vargen.models.video_vae import CausalVideoVAE
from vargen.pipelines import checks
from vargen.pipelines.description import Description
from vargen.pipelines.pixels import pixels_of
from vargen.pipelines.prompt_names import PromptNames
from vargen.pipelines.stored import StoredPipeline
from vargen.pipelines.video_blocks import VideoBlocks
from vargen.pipelines.video_parts import USUAL
from vargen.scoring.frames import FrameScorer
from vargen.scoring.registry import PACKAGED, open_scorer
from vargen.values import shown, whole

from diffusers.image_processor import VaeImageProcessor  # isort: skip  # behind stored, which guards torchvision
from diffusers.utils import BaseOutput  # isort: skip

MOST_BLOCKS = 100_000
OUTPUTS = ("pil", "np", "pt", "latent")


@dataclass
class CausalVideoPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        frames: one video: a list with a list of PIL images; or float32 `[1, F, Y, X, 3]` numpy or `[1, F, 3, Y, X]` torch in
            [0, 1]; or latents, float32 `[1, F', C, Y', X']`; by `output_type`.
        stats: a row for each block; see `vargen.decoding.BlockStats`.
        fps: frames per second that it is made for.
    """

    frames: Any
    stats: BlockStats
    fps: int


class VideoStream(Iterator[Block]):
    """A video that is being made: blocks as they are finished; see `CausalVideoPipeline.stream`.

    Attributes:
        fps: frames per second.
    """

    def __init__(self, pipe: CausalVideoPipeline, blocks: BlockStream, scorer: Any, prompts: Mapping[int, str], clean: bool):
        self._pipe, self._blocks, self._scorer, self._clean = pipe, blocks, scorer, clean
        self._prompts, self._next = dict(prompts), 0
        self.fps = pipe.transformer.geometry.fps

    @torch.no_grad()
    @outside_autocast
    def __next__(self) -> Block:
        if (prompt := self._prompts.pop(self._next, None)) is not None:
            self.switch(prompt)
        block = next(self._blocks)
        self._next = block.number + 1
        return block

    @property
    def stats(self) -> BlockStats:
        """Of the blocks that are finished."""
        return self._blocks.stats

    @property
    def tau(self) -> float | None:
        """The threshold just now; what is set counts from the next decision on."""
        return self._blocks.tau

    @tau.setter
    def tau(self, value: float) -> None:
        self._blocks.tau = value

    @torch.no_grad()
    @outside_autocast
    def switch(self, prompt: str) -> None:
        """Go on with another prompt from the next block on; drafts are then scored with it."""
        condition = self._pipe.video_condition(prompt, None, self._clean)
        score = None if self._scorer is None else self._scorer.bind(self._pipe.read_prompt(prompt).text)
        self._blocks.switch(condition, score)

    def cancel(self) -> None:
        """End the video within a pass; from any thread."""
        self._blocks.cancel()

    def close(self) -> None:
        """Free what it holds; for a video that is not iterated over to its end."""
        self._blocks.close()


class CausalVideoPipeline(StoredPipeline):
    """Text to video, block by block (Huang et al. 2025, Self Forcing), with drafts routed by quality (Hu and Zhang 2026, SDVG).

    Example:
        >>> from vargen import CausalVideoPipeline
        >>> pipe = CausalVideoPipeline.from_pretrained("emoji-video")
        >>> result = pipe("a waving cat", num_blocks=6, generator=torch.Generator().manual_seed(0))
        >>> pipe.save_video(result.frames[0], "cat.mp4")

    Args:
        vae: between pixels and latents, decoding causally. transformer: the large model. draft_transformer: a small one of the
            same latents.
        preview_decoder: a cheap decoder, of the frames that drafts are scored on.
        text_encoder, tokenizer: what turns a prompt into caption features.
        defaults: `levels` of the steps, `euler`, `guidance`, `num_blocks`, `tau`, `window`, `sinks`, `caption_rows`.
        prompt_styles, prompt_names: as of `LlamaGenPipeline`.

    Raises:
        ValueError: for parts that do not belong together, or defaults that a call could not use.
    """

    family: ClassVar[str] = Routing.family
    baseline: ClassVar[str] = "target"
    default_method: ClassVar[str] = "sdvg"
    output: ClassVar[Any] = CausalVideoPipelineOutput
    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["draft_transformer", "preview_decoder"]
    _optional_components: ClassVar[list[str]] = ["text_encoder", "tokenizer", "draft_transformer", "preview_decoder"]
    _callback_tensor_inputs: ClassVar[list[str]] = []

    vae: Any
    preview_decoder: Any

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
        self._own_scorer: FrameScorer | None = None

    # -- what it is -----------------------------------------------------------------------------------------------------

    @classmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> Description:
        with torch.device("meta"):
            transformer = CausalVideoTransformer.from_config(CausalVideoTransformer.load_config(folder / "transformer"))
        geometry, given = transformer.geometry, {**USUAL, **(index.get("defaults") or {})}
        blocks = given["num_blocks"]
        passes = blocks * (len(given["levels"] or warped_levels()) + 1) - 1
        has_draft = bool((index.get("draft_transformer") or [None])[0])
        frames = geometry.pixel_frames(0, blocks * geometry.block_frames)
        side = geometry.pixel_size[0]
        return Description(
            folder, cls.__name__, "text", 0, frames, 0, {}, has_draft, passes, side, fps=geometry.fps
        )  # fmt: skip

    @classmethod
    def check_method(cls, described: Description, method: Any) -> None:
        if method.drafts and not described.has_draft:
            raise ValueError(f"{method.name} needs a draft_transformer, a smaller model, and this model has none")

    def check_runs(self, method: Any) -> None:
        method.check(self.block_model(), scored=True)

    @property
    def by_class(self) -> bool:
        return False

    @property
    def caption_rows(self) -> int:
        longest = self.transformer.config.text_len
        return int(longest or self.default("caption_rows"))

    def default(self, name: str) -> Any:
        """The checkpoint's own setting, else the usual one; see `vargen.pipelines.video_parts.USUAL`."""
        value = (self.config.defaults or {}).get(name)
        return USUAL[name] if value is None else value

    @property
    def fps(self) -> int:
        """Frames per second."""
        return self.transformer.geometry.fps

    # -- parts of a call --------------------------------------------------------------------------------------------------

    def block_model(
        self, window: int | None = None, sinks: int | None = None, motion: int | None = None
    ) -> VideoBlocks:
        """The models as `vargen.decoding.decode_blocks` sees them; arguments as in a call."""
        guidance = float(self.default("guidance"))
        null = None if guidance == 1 else self.no_caption()
        options: dict[str, Any] = {
            "fresh_noise": not self.default("euler"),
            "guidance_scale": guidance,
            "null": null,
            "window": self.default("window") if window is None else window,
            "sinks": self.default("sinks") if sinks is None else sinks,
            "motion": motion,
        }
        levels = self.default("levels") or warped_levels()
        draft = self.draft_transformer
        small = None if draft is None else VideoBlocks(draft, levels, device=self._device_of(self.transformer), **options)
        return VideoBlocks(self.transformer, levels, draft_model=small, device=self._device_of(self.transformer), **options)

    def video_condition(self, prompt: Any, prompt_embeds: Any = None, clean: bool = False) -> Condition:
        """What one video is drawn from.

        Raises:
            ValueError, TypeError: unless there is one prompt, or its features `[1, P, text_dim]`.
        """
        if prompt_embeds is not None:
            width = self.transformer.config.text_dim
            if prompt is not None or not isinstance(prompt_embeds, Tensor) or prompt_embeds.shape[::2] != (1, width):
                raise ValueError(f"prompt_embeds must be a tensor [1, P, {width}] and come without prompt")
            return Condition(caption_embeds=prompt_embeds.to(self._execution_device))
        if prompt is None:
            raise ValueError("give a prompt, for example pipe('a waving cat')")
        if len(checks.check_prompts(prompt)) != 1:
            raise ValueError(f"prompt must be one: a call makes one video, got {len(prompt)}; `then` switches between blocks")
        embeds, mask = self.encode_prompt(prompt, clean)
        return Condition(caption_embeds=embeds[:, mask[0]], caption_mask=mask[:, mask[0]])

    def no_caption(self) -> Condition:
        """What guidance leads away from: the features of an empty caption, as captions are dropped in training."""
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("this pipeline was loaded without a text encoder, which guidance needs")
        encoded = self.tokenizer([""], return_tensors="pt").to(self._execution_device)
        features = self.text_encoder(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        return Condition(caption_embeds=features if isinstance(features, Tensor) else features[0])

    def frame_scorer(self, scorer: Any = None) -> Any:
        """What scores drafts.

        Args:
            scorer: a name as `vargen score` takes it, a `Scorer`, a function of images and prompts, or an object whose
                `bind(prompt)` gives a function of a `View`. None: the packaged scorer.
        """
        if scorer is None:
            if self._own_scorer is None:
                self._own_scorer = FrameScorer(open_scorer(PACKAGED, self._execution_device))
            return self._own_scorer
        if isinstance(scorer, str):
            return FrameScorer(open_scorer(scorer, self._execution_device))
        return scorer if hasattr(scorer, "bind") and not isinstance(scorer, type) else FrameScorer(scorer)

    def _decoder(self) -> StreamDecoder:
        if isinstance(self.vae, StreamDecoder):
            return self.vae
        from vargen.models.wan_vae import WanStreamDecoder

        return WanStreamDecoder(self.vae)

    def _given(self, image: Any) -> list[Tensor]:
        """The latents of a picture that a video starts from."""
        if image is None:
            return []
        rows, columns = self.transformer.geometry.pixel_size
        pixels = pixels_of(image, self.image_processor, rows)
        if len(pixels) != 1 or pixels.shape[2:] != (rows, columns):
            raise ValueError(f"image must be one picture of {columns} x {rows} pixels, got {list(pixels.shape)}")
        decoder: Any = self._decoder()
        return [decoder.encode(pixels[None].to(self._device_of(self.vae)))]

    # -- the call -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @outside_autocast
    def stream(
        self,
        prompt: str | None = None,
        *,
        image: Any = None,
        num_blocks: int | None = None,
        accelerator: str | Routing | None = None,
        tau: float | None = None,
        scorer: Any = None,
        then: Mapping[int, str] | None = None,
        window: int | None = None,
        sinks: int | None = None,
        motion: int | None = None,
        generator: torch.Generator | None = None,
        prompt_embeds: Tensor | None = None,
        callback: Callable[[Progress], bool | None] | None = None,
        clean_prompt: bool = False,
        profile: bool = False,
    ) -> VideoStream:
        """Start a video; each block is made when it is asked for.

        Args:
            prompt: what to show.
            image: the picture to start from: a PIL image, or float `[1, 3, Y, X]` in [0, 1]; it is resized. Its frame is not
                part of the result.
            num_blocks: length in blocks. None: the checkpoint's own.
            accelerator: name of a preset (`vargen info presets` lists them), or a `Routing`. None: `"sdvg"`, or `"target"`
                for a model that has no drafter.
            tau: threshold of methods that have one, on the scorer's scale; None: the checkpoint's, else the method's.
            scorer: see `frame_scorer`; of methods that score.
            then: other prompts by the block that they begin with, above 0.
            window, sinks: latent frames that a block sees at most, and first ones of the video among them that stay visible.
                None: the checkpoint's, which without a window sees all.
            motion: level of motion, for models that know levels.
            generator: of all noise.
            prompt_embeds: features `[1, P, text_dim]` instead of a prompt; not for methods that score.
            callback: called after every pass with a `Progress`; returning False ends the video.
            clean_prompt: see `LlamaGenPipeline`. profile: see `decode_blocks`.

        Raises:
            ValueError, TypeError: for bad arguments, naming the argument, the value and what is allowed, before anything runs.
        """
        if self.transformer is None or self.vae is None:
            raise ValueError("this pipeline was loaded without a transformer or vae: it only encodes prompts")
        blocks = self.default("num_blocks") if num_blocks is None else whole(num_blocks, 1, MOST_BLOCKS)
        if blocks is None:
            raise ValueError(f"num_blocks must be a whole number from 1 to {MOST_BLOCKS}, got {shown(num_blocks)}")
        method = self.chosen(accelerator, tau)
        levels = self.transformer.config.motion_levels
        if motion is not None and whole(motion, 0, levels - 1) is None:
            known = f"from 0 to {levels - 1}" if levels else "left out: this model knows no levels"
            raise ValueError(f"motion must be {known}, got {shown(motion)}")
        _check_window(window, sinks, self.transformer.geometry.block_frames)
        later = _check_then(then, blocks)
        scored = method.policy.scored or method.policy.reference
        if prompt is None and prompt_embeds is None:
            raise ValueError("give a prompt, for example pipe('a waving cat')")
        if scored and prompt is None:
            raise ValueError(f"accelerator {method.name!r} scores drafts with the prompt: give prompt, not prompt_embeds")
        seeds = checks.image_seeds(generator, 1)
        condition = self.video_condition(prompt, prompt_embeds, clean_prompt)
        judge = self.frame_scorer(scorer) if scored else None
        made = decode_blocks(
            self.block_model(window, sinks, motion),
            condition,
            int(seeds.noise[0]),
            method,
            blocks=blocks,
            decoder=self._decoder(),
            preview=self.preview_decoder,
            score=None if judge is None else judge.bind(self.read_prompt(str(prompt)).text),
            given=self._given(image),
            callback=callback,
            profile=profile,
        )
        made.stats.seed = seeds.asked[0]
        return VideoStream(self, made, judge, later, clean_prompt)

    def chosen(self, accelerator: Any, tau: Any = None) -> Routing:
        """The method of a call, with its threshold.

        Raises:
            ValueError, TypeError: for an unknown one, one that this pipeline cannot run, or a `tau` that it has no use for.
        """
        usual = self.default_method if self.draft_transformer is not None else self.baseline
        method = self.resolved(usual if accelerator is None else accelerator)
        if tau is not None:
            return method.with_tau(tau)
        own = self.default("tau")
        by_name = accelerator is None or isinstance(accelerator, str)
        return method.with_tau(own) if own is not None and by_name and method.threshold is not None else method

    @torch.no_grad()
    @outside_autocast
    def __call__(
        self,
        prompt: str | None = None,
        *,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        **options: Any,
    ) -> CausalVideoPipelineOutput | tuple[Any]:
        """Make a video.

        Args:
            prompt, **options: of `stream`.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"`.
            return_dict: False returns `(frames,)`.
            callback_on_step_end: called as `f(pipe, passes, block, {})` after every pass. Returning `{"stop": True}` ends the
                video with the blocks that are finished.

        Raises:
            ValueError, TypeError: as `stream`. NonFiniteLatentsError: see `decode_blocks`.
        """
        checks.check_output_type(output_type)
        checks.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        own = options.pop("callback", None)

        def callback(progress: Progress) -> bool | None:
            if own is not None and own(progress) is False:
                return False
            if callback_on_step_end is None:
                return None
            answer = callback_on_step_end(self, progress.passes - 1, progress.block, {})
            return not (answer or {}).get("stop", False)

        stream = self.stream(prompt, callback=callback, **options)
        latents, frames = [], []
        with self.progress_bar(total=stream._blocks.blocks) as bar:
            for block in stream:
                bar.update(1)
                if output_type == "latent":
                    latents.append(block.latents)
                else:
                    frames.append(block.frames.mul(255).round().byte().cpu() if output_type == "pil" else block.frames)
        self.maybe_free_model_hooks()
        made = _output(latents if output_type == "latent" else frames, output_type)
        return CausalVideoPipelineOutput(frames=made, stats=stream.stats, fps=self.fps) if return_dict else (made,)

    def save_video(self, frames: Any, path: Any, fps: int | None = None) -> Path:
        """Write frames to an .mp4, .gif or .webp file, whole or not at all; see `vargen.pipelines.video_files.save_video`."""
        from vargen.pipelines.video_files import save_video

        return save_video(frames, path, self.fps if fps is None else fps)


def _output(parts: list[Tensor], output_type: str) -> Any:
    """Parts `[F, ...]` of one video as a call returns them."""
    if output_type == "pil":
        return [[Image.fromarray(frame) for part in parts for frame in part.permute(0, 2, 3, 1).numpy()]]
    if not parts:  # stopped before the first block
        return np.zeros((1, 0)) if output_type == "np" else torch.zeros(1, 0)
    video = torch.cat(parts)[None]
    return video.permute(0, 1, 3, 4, 2).cpu().numpy() if output_type == "np" else video


def _check_window(window: Any, sinks: Any, block: int) -> None:
    if sinks is not None and whole(sinks, 0) is None:
        raise ValueError(f"sinks must be a whole number of latent frames from 0, got {shown(sinks)}")
    least = block + (sinks or 0)
    if window is not None and whole(window, least) is None:
        raise ValueError(f"window must be a whole number of at least {least} latent frames, got {shown(window)}")


def _check_then(then: Any, blocks: int) -> dict[int, str]:
    if then is None:
        return {}
    if not isinstance(then, Mapping) or any(whole(block, 1, blocks - 1) is None for block in then):
        raise ValueError(f"then must map blocks from 1 to {blocks - 1} to prompts, got {shown(then)}")
    for prompt in then.values():
        if len(checks.check_prompts(prompt, "then")) != 1:
            raise ValueError(f"then must have one prompt for each block, got {shown(prompt)}")
    return dict(then)
