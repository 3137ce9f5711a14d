"""Helios of diffusers as the block loop sees it: a block is a call of the user's own pipeline for one chunk of latents.

Helios (Yuan et al. 2026, arXiv:2603.04379) generates chunks from the latents before them and has no KV cache. The call for a
chunk gets those as `video_latents` and the first frame as `image_latents`, both without new noise: the chunk is bit for bit
that of a call for the whole video. Read from diffusers 0.38 and 0.42.

Shape suffixes: F latent frames, C latent channels, Y/X latent rows and columns, T frames of pixels.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Purpose
from vargen.decoding.video.denoising import BlockGenerator
from vargen.decoding.video.interfaces import BlockModel
from vargen.decoding.video.loop import StopRequested
from vargen.kernels.noise_bits import make_keys
from vargen.values import parse_int, require_int, short_repr

from diffusers.utils.torch_utils import randn_tensor  # isort: skip  (after the torchvision guard)

# Arguments of both classes that a caller of ours may give; all others say what a chunk continues, or what is returned.
OPTIONS = (
    "height", "width", "history_sizes", "num_latent_frames_per_chunk", "guidance_scale", "attention_kwargs",
    "num_inference_steps",
    "pyramid_num_inference_steps_list", "use_zero_init", "zero_steps", "is_amplify_first_chunk",
)  # fmt: skip
SHARED_OPTIONS = OPTIONS[:4]  # the same for target and drafter, because latents cross between them


class HeliosPrompt(NamedTuple):
    """Features of a prompt and of the negative one, float `[1, P, text_dim]`, which target and drafter share."""

    embeds: Tensor
    negative: Tensor


@dataclass
class HeliosState:
    """What the next chunk of a video follows from.

    Attributes:
        first: latents of the first frame, float32 `[1, C, 1, Y, X]`; None before there is one.
        history: the latest frames, as many as the network sees, float32 `[1, C, F, Y, X]`; None before there are any.
        blocks: number of finished blocks.
    """

    prompt: HeliosPrompt
    first: Tensor | None
    history: Tensor | None
    blocks: int = 0


class HeliosGenerator(BlockGenerator):
    """Runs the pipeline's own loop for a block. Passes are calls of the transformer; `on_pass` is called after every step."""

    model: HeliosBlockModel

    def update_cache(self) -> None:
        """Add pending blocks to the history, which takes no pass."""
        for latents in self.pending:
            self.model.extend(self.state, latents)
        self.pending.clear()

    def generate(self, noise: Callable[[int], Tensor], last: int | None = None) -> Tensor:
        """Generate the next block, `[1, F, C, Y, X]`, from noise of the model's own `noise`."""
        self.update_cache()
        return self.model.generate(self.state, self._after_step)

    def _after_step(self, passes: int) -> None:
        self.passes += passes
        self.on_pass()


class HeliosBlockModel(BlockModel):
    """`BlockModel` of a `HeliosPipeline` or `HeliosPyramidPipeline`, for one video.

    Args:
        pipe: the pipeline, which is left as it is.
        options: arguments of its calls, of `OPTIONS`.
        noise: returns the generator of a block's noise by the block's number.

    Raises:
        ValueError: for an option that is out of range or does not fit the pipeline.
    """

    generator_class = HeliosGenerator
    draft_model: HeliosBlockModel | None

    def __init__(
        self,
        pipe: Any,
        options: Mapping[str, Any],
        noise: Callable[[int], torch.Generator],
        draft_model: HeliosBlockModel | None = None,
    ):
        self.pipe, self.options, self.noise, self.draft_model = pipe, dict(options), noise, draft_model
        self.device, self.first, self.before = pipe._execution_device, None, None
        settings = {**default_options(pipe), **options}
        self.stages = 1
        if "num_inference_steps" in settings:
            require_int("num_inference_steps", settings["num_inference_steps"], 1)
        else:
            self.stages = pipe.scheduler.config.stages
            _validate_counts("pyramid_num_inference_steps_list", settings["pyramid_num_inference_steps_list"], self.stages)
        _validate_counts("history_sizes", settings["history_sizes"], 3)
        self.history_frames = sum(settings["history_sizes"])
        scale, patch = pipe.vae_scale_factor_spatial, pipe.transformer.config.patch_size[1]
        multiple = scale * patch * 2 ** (self.stages - 1)  # each stage doubles the size
        for name in ("height", "width"):
            if require_int(name, settings[name], multiple) % multiple:
                raise ValueError(f"{name} must be a multiple of {multiple} for {type(pipe).__name__}, got {settings[name]}")
        frames = require_int("num_latent_frames_per_chunk", settings["num_latent_frames_per_chunk"], 1)
        self.size = settings["height"], settings["width"]
        self.block_shape = (frames, pipe.transformer.config.in_channels, *(each // scale for each in self.size))

    def begin_with(self, image: Any, generator: torch.Generator) -> None:
        """Let the video, of the drafter too, begin with an image: PIL, or float `[1, 3, Y, X]` in [0, 1].

        `generator` is consumed as by a call of the pipeline, which adds noise of a random level to the latents of the image,
        and of the last frame of a still video of it.
        """
        pipe, device, parameters = self.pipe, self.device, inspect.signature(type(self.pipe).__call__).parameters
        mean, inverse = latent_statistics(pipe.vae, device)
        found = pipe.prepare_image_latents(
            pipe.video_processor.preprocess(image, *self.size),
            mean, inverse, self.block_shape[0], dtype=torch.float32, device=device, generator=generator,
        )  # fmt: skip
        noisy = []
        for kind, latents in zip(("image", "video"), found, strict=True):
            low, high = (parameters[f"{kind}_noise_sigma_{end}"].default for end in ("min", "max"))
            level = torch.rand(1, device=generator.device, generator=generator).to(device) * (high - low) + low
            noise = randn_tensor(latents.shape, generator=generator, device=device)
            noisy.append(level * noise + (1 - level) * latents)
        for model in (self, self.draft_model):
            if model is not None:
                model.first, model.before = noisy

    def start(self, condition: HeliosPrompt, frames: int) -> HeliosState:
        return HeliosState(condition, self.first, self.before)

    def switch(self, state: HeliosState, condition: HeliosPrompt) -> None:
        state.prompt = condition

    def extend(self, state: HeliosState, latents_FCYX: Tensor) -> None:
        """Add a finished block `[1, F, C, Y, X]` to the history."""
        latents = latents_FCYX.transpose(1, 2).to(self.device, torch.float32)
        state.first = latents[:, :, :1] if state.first is None else state.first
        before = [] if state.history is None else [state.history]
        state.history = torch.cat([*before, latents], 2)[:, :, -self.history_frames :]
        state.blocks += 1

    def generate(self, state: HeliosState, after_step: Callable[[int], None]) -> Tensor:
        """Call the pipeline for the next block: latents float32 `[1, F, C, Y, X]`.

        Args:
            after_step: called after every step with the number of its passes.
        """
        options = dict(self.options)
        if state.blocks and "is_amplify_first_chunk" in options:
            options["is_amplify_first_chunk"] = False
        stages = self.stages

        def after(pipe: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            nonlocal stages
            after_step(2 if pipe.do_classifier_free_guidance else 1)
            stages -= step + 1 == pipe.num_timesteps
            if not stages:
                raise _Finished(tensors["latents"])
            return {}

        first, before = (None if each is None else each.to(self.device) for each in (state.first, state.history))
        try:
            self.pipe(
                prompt_embeds=state.prompt.embeds.to(self.device),
                negative_prompt_embeds=state.prompt.negative.to(self.device),
                num_frames=1,  # one chunk
                generator=self.noise(state.blocks),
                image_latents=first,
                video_latents=before,
                add_noise_to_image_latents=False,
                add_noise_to_video_latents=False,
                output_type="latent",
                callback_on_step_end=after,
                callback_on_step_end_tensor_inputs=["latents"],
                **options,
            )
        except _Finished as finished:
            return finished.latents.float().transpose(1, 2)
        finally:
            self.pipe.maybe_free_model_hooks()  # as at the end of a call
        raise StopRequested  # the user set the pipeline's own interrupt, which skips the last step


class _Finished(Exception):
    """Leaves a call after its last step, before it decodes the chunk: the loop decodes, and only what it shows or scores."""

    def __init__(self, latents: Tensor):
        super().__init__()
        self.latents = latents


class HeliosDecoder:
    """`BlockDecoder` of the pipeline's VAE, which decodes each chunk alone. The state is the number of decoded chunks.

    Args:
        blocks: of the whole video, whose last frames are cut, as in diffusers, to a multiple of the temporal stride plus 1.
    """

    def __init__(self, pipe: Any, blocks: int):
        self.pipe, self.blocks = pipe, blocks

    def decode_block(self, latents: Tensor, state: int | None = None) -> tuple[Tensor, int]:
        """Return the pixels `[1, T, 3, Y, X]` of a block `[1, F, C, Y, X]`, and the state after it."""
        vae, number = self.pipe.vae, (state or 0) + 1
        mean, inverse = latent_statistics(vae, self.pipe._execution_device)
        scaled = latents.transpose(1, 2).to(mean.device, vae.dtype) / inverse + mean
        pixels = vae.decode(scaled, return_dict=False)[0].transpose(1, 2)
        if number == self.blocks:
            extra = (number * pixels.shape[1] - 1) % self.pipe.vae_scale_factor_temporal
            pixels = pixels[:, : pixels.shape[1] - extra]
        return pixels, number


def _validate_counts(name: str, values: Any, count: int) -> None:
    if not isinstance(values, list | tuple) or len(values) != count or any((parse_int(each, 0) or 0) < 1 for each in values):
        raise ValueError(f"{name} must be a list of {count} whole numbers above 0, got {short_repr(values)}")


def default_options(pipe: Any) -> dict[str, Any]:
    """Return those of `OPTIONS` that a pipeline's call has, with their defaults."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    return {name: parameters[name].default for name in OPTIONS if name in parameters}


def count_blocks(pipe: Any, num_frames: int, latent_frames: int) -> int:
    """Return how many chunks of `latent_frames` a call generates for a number of frames."""
    return math.ceil(num_frames / ((latent_frames - 1) * pipe.vae_scale_factor_temporal + 1))


def latent_statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation of latents `[1, C, 1, 1, 1]`, rounded to the VAE's dtype as diffusers does."""
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(device, vae.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1.0 / deviation


def encode_helios_prompt(pipe: Any, prompt: str, negative_prompt: str | None, max_sequence_length: int) -> HeliosPrompt:
    """Encode a prompt, and a negative one, with the pipeline's text encoder."""
    options = {"negative_prompt": negative_prompt, "max_sequence_length": max_sequence_length}
    return HeliosPrompt(*pipe.encode_prompt(prompt, do_classifier_free_guidance=True, **options))


def draft_noise(seed: int) -> Callable[[int], torch.Generator]:
    """Return the `noise` of a drafter: generators that depend only on the seed of the video and the number of the block."""
    seeds = torch.tensor([seed])

    def noise(block: int) -> torch.Generator:
        return torch.Generator().manual_seed(int(make_keys(seeds, torch.tensor([[block]]), Purpose.DRAFT)))

    return noise
