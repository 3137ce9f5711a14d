"""Pipeline around an image language model of transformers that is already in memory: `vargen.accelerate(model, processor)`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding import Accelerator, Sampling, decode, resolve_method
from vargen.decoding.method import DEFAULT_METHOD
from vargen.decoding.next_token.log_probs import compute_log_probs
from vargen.decoding.seeds import resolve_seeds
from vargen.device import select_device
from vargen.files import expand_user
from vargen.models.component_files import read_config, refuse_code_files
from vargen.pipelines import validation
from vargen.pipelines.adapters.image_language_models import MODELS, describe_language_model
from vargen.pipelines.adapters.transformers import PromptRows, TransformersTokenModel
from vargen.pipelines.images import ImagePipelineOutput, decode_pixels
from vargen.pipelines.loading import fetch_folder
from vargen.values import short_repr

logger = logging.getLogger("vargen")


@dataclass
class LanguageModelOutput(ImagePipelineOutput):
    """Output of `LanguageModelPipeline`.

    Attributes:
        tokens: int64 `[B, N]`.
        log_probs, plain_log_probs: float32 `[B, N]`, if they were requested; see `compute_log_probs`.
    """

    tokens: Tensor | None = None
    log_probs: Tensor | None = None
    plain_log_probs: Tensor | None = None


class LanguageModelPipeline:
    """Generates images with an image language model of transformers, by any next-token method of vargen.

    Args:
        model: see `vargen.pipelines.adapters.image_language_models`; in evaluation mode. Its weights stay where they are.
        processor: the model's processor.
        draft_model: a smaller model of the same class with the same image tokens, for `speculative`.
        options: of the model's description, such as `size` of Emu3.

    Raises:
        TypeError: if the class of the model is unknown.
        ValueError: if the network does not fit, or the draft model has other image tokens.
    """

    def __init__(self, model: Any, processor: Any, draft_model: Any = None, **options: Any):
        self.language_model = describe_language_model(model, **options)
        self.processor = processor
        self.draft = None if draft_model is None else describe_language_model(draft_model, **options)
        if self.draft is not None:
            for name in ("vocab", "grid"):
                own, other = getattr(self.language_model, name), getattr(self.draft, name)
                if own != other:
                    raise ValueError(f"draft_model must have the {name} of the model, {own}, got {other}")
        self.decoding_model(1.0)  # refuses networks that do not fit

    def decoding_model(self, guidance_scale: float) -> TransformersTokenModel:
        """Return the adapter of the model, for `vargen.decoding.decode`."""
        draft = None if self.draft is None else TransformersTokenModel(self.draft, guidance_scale)
        return TransformersTokenModel(self.language_model, guidance_scale, draft)

    @torch.no_grad()
    @without_autocast
    def __call__(
        self,
        prompt: str | list[str],
        *,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        accelerator: str | Accelerator = DEFAULT_METHOD,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_log_probs: bool = False,
    ) -> LanguageModelOutput:
        """Generate images.

        Args:
            prompt: one prompt or several.
            negative_prompt: replaces the unconditional prompt, for models that take one; one for all, or one per prompt.
            num_images_per_prompt: number of images per prompt.
            guidance_scale, temperature, top_k, top_p: None selects the published default of the model.
            accelerator: name of a next-token preset, or an `Accelerator`.
            generator: as in `LlamaGenPipeline.__call__`.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_log_probs: also return log-probabilities of the tokens; see `compute_log_probs`.

        Raises:
            ValueError, TypeError: for invalid arguments, naming the argument, its value and what is allowed.
            NonFiniteLogitsError: if the model returns NaN or infinite logits.
        """
        known = self.language_model
        prompts = validation.validate_prompts(prompt)
        negative = None if negative_prompt is None else validation.validate_prompts(negative_prompt, "negative_prompt")
        if negative is not None and len(negative) not in (1, len(prompts)):
            raise ValueError(f"negative_prompt must be one, or one for each of {len(prompts)} prompts, got {len(negative)}")
        validation.validate_output_type(output_type)
        if not known.has_pixels and output_type != "latent":
            raise ValueError(f"output_type must be 'latent': another pipeline decodes the tokens of {known.class_name}")
        method = resolve_method(accelerator)
        defaults = {name: getattr(known, name) for name in ("guidance_scale", "temperature", "top_k", "top_p")}
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        scale, sampling = validation.validate_sampling(settings)
        if sampling.top_k is not None and sampling.top_k > known.vocab and top_k is None:
            sampling = Sampling(sampling.temperature, None, sampling.top_p)
        per_prompt = validation.validate_num_images(num_images_per_prompt, len(prompts))
        seeds = resolve_seeds(generator, len(prompts) * per_prompt)
        model = self.decoding_model(scale)
        blank = None if negative is None else negative * (len(prompts) // len(negative))
        rows = self._encode(prompts, blank, scale != 1, per_prompt)
        result = decode(model, rows, seeds.noise_seeds, method, sampling)
        result.stats.seeds = seeds.seeds
        images = self.decode_tokens(result.tokens, output_type)
        if not return_log_probs:
            return LanguageModelOutput(images, result.stats, result.tokens)
        if method.kind != "exact":
            logger.warning("log-probabilities are those of the model; %s samples from another distribution", method.name)
        log_probs, plain = compute_log_probs(model, rows, result.tokens, sampling)
        return LanguageModelOutput(images, result.stats, result.tokens, log_probs, plain)

    def _encode(self, prompts: list[str], negative: list[str] | None, guided: bool, per_prompt: int) -> PromptRows:
        found = self.language_model.encode_prompts(self.processor, prompts, negative, guided)
        limit = getattr(self.language_model.body.config.get_text_config(), "max_position_embeddings", None)
        rows, columns = self.language_model.grid
        if limit is not None and rows * columns >= limit:
            raise ValueError(f"size must fit the context of {limit} tokens, got {rows} x {columns} tokens")
        if limit is not None and found.ids.shape[1] + rows * columns > limit:
            raise ValueError(
                f"prompt must be at most {limit - rows * columns} tokens, so that the image fits the context of {limit}, got "
                f"{found.ids.shape[1]}"
            )
        ids, valid = (each.repeat_interleave(per_prompt, 0) for each in (found.ids, found.valid))
        return PromptRows(ids, valid)

    @torch.no_grad()
    def decode_tokens(self, tokens: Tensor, output_type: str = "pil") -> Any:
        """Decode tokens int64 `[B, N]` to images; `"latent"` returns them as `[B, rows, columns]`."""
        if output_type == "latent":
            return tokens.reshape(-1, *self.language_model.grid)
        pixels = decode_pixels(self.language_model.decode_pixels, tokens)
        if output_type == "pt":
            return pixels
        array = VaeImageProcessor.pt_to_numpy(pixels)
        return array if output_type == "np" else VaeImageProcessor.numpy_to_pil(array)


def accelerate(model: Any, processor: Any, draft_model: Any = None, **options: Any) -> LanguageModelPipeline:
    """Return a pipeline for an image language model of transformers; see `LanguageModelPipeline`."""
    return LanguageModelPipeline(model, processor, draft_model, **options)


_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def open_language_model(
    name: str | Path,
    draft_model: str | Path | None = None,
    *,
    torch_dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> LanguageModelPipeline:
    """Load an image language model from a folder of transformers, or from the hub, and return its pipeline.

    Weights are read from safetensors only, and nothing in the folder is run.

    Args:
        name: a folder with `config.json`, or a hub id `"owner/name"`.
        draft_model: the same, for a smaller model with the same image tokens.
        torch_dtype: of both models. Default: that of the stored weights on a GPU, float32 on a CPU.
        device: where the models run; `"auto"` selects a GPU if there is one. Default: the CPU.
        **options: of the model's description, such as `size` of Emu3.

    Raises:
        ValueError: before any weight is read: if there is no such folder, the folder asks for code or has no safetensors, its
            class is not supported, or the installed transformers lacks it.
    """
    place = torch.device("cpu") if device is None else select_device(device)
    dtype = torch_dtype or (torch.float32 if place.type == "cpu" else "auto")
    folders = [_find_folder(each) for each in (name, draft_model) if each is not None]
    classes = [_find_class(folder) for folder in folders]  # of both, before the weights of one are read
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folders[0], local_files_only=True, trust_remote_code=False)
    models = [
        cls.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True).to(place).eval()
        for cls, folder in zip(classes, folders, strict=True)
    ]
    return LanguageModelPipeline(models[0], processor, *models[1:], **options)


def _find_folder(name: str | Path) -> Path:
    path = expand_user(name)
    if path.is_dir():
        return path
    if str(name).count("/") != 1:
        raise ValueError(f"model must be a folder or a hub id owner/name, got {short_repr(str(name))}")
    return fetch_folder(str(name), _FILES)


def _find_class(folder: Path) -> Any:
    """Return the class of transformers of a folder, whose files are validated without reading weights."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json, so it is not a model of transformers")
    refuse_code_files(folder)
    found = (read_config(file).get("architectures") or [None])[0]
    if found not in MODELS:
        raise ValueError(f"{file} describes a {found!r}; vargen runs {', '.join(MODELS)}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no *.safetensors, and vargen reads no other weights of transformers")
    import transformers

    cls = getattr(transformers, found, None)
    if cls is None:
        raise ValueError(f"{found} needs transformers {MODELS[found].since}, got {transformers.__version__}")
    return cls
