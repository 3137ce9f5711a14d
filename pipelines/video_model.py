"""Base class of video pipelines: conditions, models, scorers and methods of a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.compat import tokenized
from vargen.decoding import VideoMethod
from vargen.decoding.video.denoising import shifted_levels
from vargen.decoding.video.policies import validate_threshold
from vargen.models.causal_video import CausalVideoTransformer, geometry_from_config
from vargen.models.condition import Condition
from vargen.models.tokenizers.video_vae import StreamingDecoder
from vargen.pipelines import validation as checks
from vargen.pipelines.adapters.causal_video import CausalVideoBlockModel
from vargen.pipelines.images import preprocess_images
from vargen.pipelines.model_info import ModelInfo
from vargen.pipelines.stored import StoredPipeline
from vargen.scoring.frames import FrameScorer
from vargen.scoring.registry import DEFAULT_SCORER
from vargen.specs import parse_spec
from vargen.values import parse_float, parse_int, short_repr

# Settings that `defaults` may contain, with the values used otherwise.
DEFAULT_SETTINGS: dict[str, Any] = {
    "levels": None,  # noise levels of the steps; None: those of the distilled models
    "euler": False,  # integrate the velocity instead of adding fresh noise to each estimate
    "guidance": 1.0,
    "num_blocks": 8,
    "tau": None,  # None: the method's
    "window": None,
    "sinks": 0,
    "caption_rows": 64,
    "scored_frames": None,  # frames of a drafted block to score; None: all
}
_LIMITS = {  # minimum and maximum
    "num_blocks": (1, 100_000),
    "window": (1, 1_000_000),
    "sinks": (0, 1_000_000),
    "caption_rows": (1, 65_536),
    "scored_frames": (1, 1024),
}


def check_settings(defaults: Any, transformer: Any = None) -> None:
    """Raise ValueError unless it is None or a dict of valid settings in `DEFAULT_SETTINGS`."""
    if defaults is None:
        return
    if not isinstance(defaults, dict) or any(name not in DEFAULT_SETTINGS for name in defaults):
        raise ValueError(f"defaults must be a dict of {', '.join(DEFAULT_SETTINGS)}, or None, got {short_repr(defaults)}")
    given = {name: value for name, value in defaults.items() if value is not None}
    levels = given.get("levels", [1.0])
    numbers = [parse_float(level) for level in levels] if isinstance(levels, list | tuple) and levels else [None]
    falling = None not in numbers and all(a > b for a, b in pairwise(numbers))  # type: ignore[operator]
    if not falling or not 0 < numbers[-1] <= numbers[0] <= 1:  # type: ignore[operator]
        raise ValueError(f"defaults: levels must fall from at most 1 to above 0, got {short_repr(levels)}")
    if not isinstance(given.get("euler", False), bool):
        raise ValueError(f"defaults: euler must be true or false, got {short_repr(given['euler'])}")
    guidance = parse_float(given.get("guidance", 1.0))
    if guidance is None or guidance < 0:
        raise ValueError(f"defaults: guidance must be a number of at least 0, got {short_repr(given['guidance'])}")
    for name, (minimum, maximum) in _LIMITS.items():
        if name in given and parse_int(given[name], minimum, maximum) is None:
            allowed = f"a whole number from {minimum} to {maximum}"
            raise ValueError(f"defaults: {name} must be {allowed}, got {short_repr(given[name])}")
    try:
        validate_threshold(given.get("tau", 0.0))
    except TypeError as error:
        raise ValueError(f"defaults: {error}") from error


def check_geometry(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the draft transformer and the VAE have the latents of the transformer.

    Args:
        configs: configuration by component, None for a missing one.
    """
    geometry = geometry_from_config(SimpleNamespace(**configs["transformer"]))
    if draft := configs.get("draft_transformer"):
        other = geometry_from_config(SimpleNamespace(**draft))
        if not geometry.same_latents(other):
            raise ValueError(f"draft_transformer and transformer do not belong together: {other} and {geometry}")
    size = (configs.get("vae") or {}).get("size")
    if size is not None and (size, size) != geometry.pixel_size:
        raise ValueError(
            f"vae and transformer do not belong together: frames of the vae are {size} pixels square, those of the "
            f"transformer's latents {list(geometry.pixel_size)}"
        )


class VideoModel(StoredPipeline):
    """Prepares networks, conditions and scorers for the generation of a video; see `CausalVideoPipeline`."""

    paradigm: ClassVar[str] = VideoMethod.paradigm
    baseline: ClassVar[str] = "target"
    default_method: ClassVar[str] = "sdvg"

    vae: Any
    preview_decoder: Any
    image_processor: Any

    @classmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> ModelInfo:
        with torch.device("meta"):
            transformer = CausalVideoTransformer.from_config(CausalVideoTransformer.load_config(folder / "transformer"))
        geometry, given = transformer.geometry, {**DEFAULT_SETTINGS, **(index.get("defaults") or {})}
        blocks = given["num_blocks"]
        passes = blocks * (len(given["levels"] or shifted_levels()) + 1) - 1
        has_draft = bool((index.get("draft_transformer") or [None])[0])
        frames = geometry.pixel_frames(0, blocks * geometry.block_frames)
        side = geometry.pixel_size[0]
        return ModelInfo(
            folder, cls.__name__, "text", 0, frames, 0, {}, has_draft, passes, side, fps=geometry.fps
        )  # fmt: skip

    @classmethod
    def check_method(cls, described: ModelInfo, method: Any) -> None:
        if method.needs_draft_model and not described.has_draft:
            raise ValueError(f"{method.name} needs a draft_transformer, a smaller model, and this model has none")

    def check_runs(self, method: Any) -> None:
        method.validate_models(self.block_model(), has_scorer=True)

    @property
    def by_class(self) -> bool:
        return False

    @property
    def caption_rows(self) -> int:
        longest = self.transformer.config.text_len
        return int(longest or self.default("caption_rows"))

    def default(self, name: str) -> Any:
        """Return the checkpoint's value of a setting, else the one in `DEFAULT_SETTINGS`."""
        value = (self.config.defaults or {}).get(name)
        return DEFAULT_SETTINGS[name] if value is None else value

    @property
    def fps(self) -> int:
        """Frames per second."""
        return self.transformer.geometry.fps

    # -- steps of a call --------------------------------------------------------------------------------------------------

    def block_model(
        self, window: int | None = None, sinks: int | None = None, motion: int | None = None
    ) -> CausalVideoBlockModel:
        """Return the adapter of both models for `vargen.decoding.decode_video`; arguments as in `stream`."""
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
        levels = self.default("levels") or shifted_levels()
        draft = self.draft_transformer
        small = (
            None if draft is None else CausalVideoBlockModel(draft, levels, device=self._device_of(self.transformer), **options)
        )
        return CausalVideoBlockModel(
            self.transformer, levels, draft_model=small, device=self._device_of(self.transformer), **options
        )

    def video_condition(self, prompt: Any, prompt_embeds: Any = None, clean: bool = False) -> Condition:
        """Return the condition of one video.

        Raises:
            ValueError, TypeError: unless there is exactly one prompt, or its features `[1, P, text_dim]`.
        """
        if prompt_embeds is not None:
            width = self.transformer.config.text_dim
            if prompt is not None or not isinstance(prompt_embeds, Tensor) or prompt_embeds.shape[::2] != (1, width):
                raise ValueError(f"prompt_embeds must be a tensor [1, P, {width}] and come without prompt")
            return Condition(caption_embeds=prompt_embeds.to(self._execution_device))
        if prompt is None:
            raise ValueError("give a prompt, for example pipe('a waving cat')")
        if len(checks.check_prompts(prompt)) != 1:
            raise ValueError(f"prompt must be one, got {len(prompt)}: a stream is one video; a call takes several")
        embeds, mask = self.encode_prompt(prompt, clean)
        return Condition(caption_embeds=embeds[:, mask[0]], caption_mask=mask[:, mask[0]])

    def no_caption(self) -> Condition:
        """Return the null condition: features of an empty caption, as in training with caption dropout."""
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("this pipeline was loaded without a text encoder, which guidance needs")
        encoded = tokenized(self.tokenizer, [""], return_tensors="pt").to(self._execution_device)
        features = self.text_encoder(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        return Condition(caption_embeds=features if isinstance(features, Tensor) else features[0])

    def scored_prompt(self, prompt: str) -> str:
        """Return the prompt for scorers: normalized, with the model's style appended if the model has only one.

        Without it, a scorer trained with several styles would prefer a mixture of them.
        """
        text = self.normalize_prompt(prompt).text
        styles = list(self.config.prompt_styles or ())
        named = len(styles) != 1 or re.search(rf"\b{re.escape(styles[0])}\b", text, re.IGNORECASE)
        return text if named else f"{text}, {styles[0]} style"

    def frame_scorer(self, scorer: Any = None) -> Any:
        """Return the scorer of drafts.

        Args:
            scorer: a name that `vargen score` accepts, a `Scorer`, a function of images and prompts, or an object whose
                `bind(prompt)` returns a function of a `BlockView`, such as a `FrameScorer`. None: the packaged scorer. Image
                scorers get the checkpoint's `scored_frames` of each block.
        """
        frames = self.default("scored_frames")
        if scorer is None or isinstance(scorer, str):
            return FrameScorer(self.named_scorer(scorer or DEFAULT_SCORER), frames=frames)
        bound = hasattr(scorer, "bind") and not isinstance(scorer, type)
        return scorer if bound else FrameScorer(scorer, frames=frames)

    def _decoder(self) -> StreamingDecoder:
        if isinstance(self.vae, StreamingDecoder):
            return self.vae
        from vargen.models.tokenizers.wan_vae import WanStreamingDecoder

        return WanStreamingDecoder(self.vae)

    def _given(self, image: Any) -> list[Tensor]:
        """Encode the start image of a video to latents."""
        if image is None:
            return []
        rows, columns = self.transformer.geometry.pixel_size
        pixels = preprocess_images(image, self.image_processor, rows, "image")
        if len(pixels) != 1 or pixels.shape[2:] != (rows, columns):
            raise ValueError(f"image must be one picture of {columns} x {rows} pixels, got {list(pixels.shape)}")
        decoder: Any = self._decoder()
        return [decoder.encode(pixels[None].to(self._device_of(self.vae)))]

    def chosen(self, accelerator: Any, tau: Any = None) -> VideoMethod:
        """Return the method of a call with its threshold.

        Raises:
            ValueError, TypeError: for an unknown method or one of another paradigm, or `tau` for a method without a threshold.
        """
        usual = self.default_method if self.draft_transformer is not None else self.baseline
        method = self.resolved(usual if accelerator is None else accelerator)
        if tau is not None:
            return method.with_tau(tau)
        own = self.default("tau")
        unset = accelerator is None or (isinstance(accelerator, str) and "tau" not in parse_spec(accelerator)[1])
        return method.with_tau(own) if own is not None and unset and method.threshold is not None else method
