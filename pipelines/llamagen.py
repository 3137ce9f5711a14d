"""`LlamaGenPipeline`: a prompt or a class to pictures, with a LlamaGen transformer and its VQ tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.compat import ensure_torchvision, outside_autocast
from vargen.decoding import DEFAULT, Accelerator, Decoded, DecodeStats, Progress, decode, resolve_accelerator
from vargen.device import check_compile
from vargen.files import expanded, whole_files
from vargen.models.llamagen import Condition, LlamaGenTransformer

# from_pretrained finds these classes by module path, so the modules must have been imported.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.models.vq import NonFinitePixelsError, VQModel
from vargen.pipelines import checks
from vargen.pipelines.captions import align_left_padded, clean_caption, unreadable_hint, warn_truncated
from vargen.pipelines.llamagen_tokens import LlamaGenTokens
from vargen.pipelines.loading import checked_folder, component_dtypes
from vargen.pipelines.memory import within_memory
from vargen.pipelines.parts import check_parts
from vargen.pipelines.prompt_names import FILE as NAMES_FILE
from vargen.pipelines.prompt_names import PromptNames, Reading
from vargen.values import shown

ensure_torchvision()

import diffusers
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput

logger = logging.getLogger("vargen")
_RELEASE = tuple(int(part) for part in diffusers.__version__.split(".")[:2])
_DTYPE = "dtype" if _RELEASE >= (0, 42) else "torch_dtype"  # what diffusers calls it


@dataclass
class LlamaGenPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        images: a list of PIL images; or float32 `[B, Y, X, 3]` numpy or `[B, 3, Y, X]` torch in [0, 1]; or tokens, int64
            `[B, rows, columns]`; by `output_type`.
        stats: what decoding did; see `vargen.decoding.DecodeStats`.
    """

    images: Any
    stats: DecodeStats


class LlamaGenPipeline(DiffusionPipeline):
    """Text or class to image with LlamaGen (Sun et al. 2024).

    Example:
        >>> from vargen import LlamaGenPipeline
        >>> pipe = LlamaGenPipeline.from_pretrained("emoji")
        >>> pipe("a red apple").images[0].save("apple.png")

    Args:
        vqvae: tokenizer between pixels and tokens.
        transformer: the network that draws tokens.
        text_encoder, tokenizer: what turns a prompt into caption features (`condition="text"` only).
        draft_transformer: a smaller transformer of the same tokens and conditions, for `accelerator="speculative"`.
        id2label: class names, comma-separated synonyms, by class number (`condition="class"` only).
        defaults: sampling defaults of this checkpoint (`guidance_scale`, `temperature`, `top_k`, `top_p`).
        prompt_names: what characters in a prompt stand for, such as "grinning cat" for "😺"; only for models whose captions
            name them so. Kept in the model folder as `prompt_names.json`.

    Raises:
        ValueError: for parts that do not belong together, class names or defaults that a call could not use.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["draft_transformer"]  # small, and it takes turns with the transformer
    _optional_components: ClassVar[list[str]] = ["text_encoder", "tokenizer", "draft_transformer"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    def __init__(
        self,
        vqvae: VQModel,
        transformer: LlamaGenTransformer,
        text_encoder: Any = None,
        tokenizer: Any = None,
        draft_transformer: LlamaGenTransformer | None = None,
        id2label: dict[int, str] | None = None,
        defaults: dict[str, Any] | None = None,
        prompt_names: PromptNames | dict[str, str] | None = None,
    ):
        networks = {
            "vqvae": vqvae, "transformer": transformer, "draft_transformer": draft_transformer, "text_encoder": text_encoder,
        }  # fmt: skip
        check_parts({name: getattr(part, "config", None) for name, part in networks.items()}, id2label, defaults)
        super().__init__()
        self.register_modules(
            vqvae=vqvae,
            transformer=transformer,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            draft_transformer=draft_transformer,
        )
        self.register_to_config(id2label=id2label, defaults=defaults)
        # Opened with transformer=None and vqvae=None, a pipeline still encodes prompts.
        self.image_processor = VaeImageProcessor(vae_scale_factor=vqvae.downsampling if vqvae is not None else 8)
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        self._compiled: Any = None
        self._guidance_scale, self._num_timesteps, self._interrupt = 1.0, 0, False

    # -- loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> LlamaGenPipeline:
        """Open a packaged model by name (`"emoji"`, no network), a folder, or a model of the hub (`"owner/name"`).

        Args:
            torch_dtype, dtype: of the transformer and a large text encoder, under diffusers' old or new name, or dtypes by
                component. Default: bfloat16 on machines with CUDA and on CPUs that multiply it in hardware, else float32. The
                image tokenizer stays in float32, as trained.
            **kwargs: of `DiffusionPipeline.from_pretrained`.

        Raises:
            ValueError: for two dtypes or one that is not of floating point, an unknown name, a folder without
                `model_index.json`, one that holds or asks for foreign code, or parts that are missing, damaged or do not
                belong together; before any weight is loaded. For `trust_remote_code` or `custom_pipeline`.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        folder = checked_folder(pretrained_model_name_or_path, cls.__name__, kwargs)
        kwargs[_DTYPE] = component_dtypes(folder, torch_dtype if dtype is None else dtype)
        kwargs.setdefault("use_safetensors", True)
        if "prompt_names" not in kwargs:
            kwargs["prompt_names"] = PromptNames.read(folder)
        return super().from_pretrained(str(folder), **kwargs)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> LlamaGenPipeline:
        """As diffusers has it; `prompt_names`, which is no part of the config, goes along."""
        kwargs.setdefault("prompt_names", getattr(pipeline, "prompt_names", None))
        return super().from_pipe(pipeline, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` opens; each file appears whole, and none if saving fails.

        Args:
            save_directory: made when missing; files of other names that it holds stay, but for shards of older weights.
            **kwargs: of `DiffusionPipeline.save_pretrained`.

        Raises:
            OSError: if the folder cannot be made or written.
        """
        folder = expanded(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with whole_files(folder) as staged:
            super().save_pretrained(str(staged), **kwargs)
            if self.prompt_names is not None:
                self.prompt_names.write(staged)
        if self.prompt_names is None:
            (folder / NAMES_FILE).unlink(missing_ok=True)  # of another model that was saved here

    # -- inputs -------------------------------------------------------------------------------------------------------

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance, temperature and filters where a call gives none: the checkpoint's own, else LlamaGen's."""
        stored = {k: v for k, v in (self.config.defaults or {}).items() if v is not None}
        return {"guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0, **stored}

    @property
    def guidance_scale(self) -> float:
        """Of the call that runs, or ran last; as the next three are."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale != 1.0

    @property
    def num_timesteps(self) -> int:
        """Passes that a call takes at most: one for each token. The `"ar"` preset takes all of them."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether someone set `_interrupt`, which ends the calls that run with what is drawn."""
        return self._interrupt

    def read_prompt(self, prompt: str) -> Reading:
        """A prompt as the model reads it: `text`, and in `names` what was typed by what it was read as; see `prompt_names`."""
        return Reading(prompt, {}) if self.prompt_names is None else self.prompt_names.reading(prompt)

    @outside_autocast
    def encode_prompt(
        self, prompt: str | list[str], clean: bool = False, max_sequence_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """A call's `prompt_embeds` `[B, P, C]` (valid rows last, padding zero) and bool `prompt_mask` `[B, P]`.

        Prompts are read by `read_prompt`. Those longer than P tokens are cut, with a warning that says how much was lost; words
        that the text encoder cannot read get a warning too.

        Args:
            prompt: one prompt or several.
            clean: clean them first; see `clean_prompt` of a call.
            max_sequence_length: P; default: what the transformer takes. A pipeline opened without one has to be told.

        Raises:
            ValueError, TypeError: for prompts that a call refuses, no text encoder, or no P.
        """
        prompts = checks.check_prompts(prompt)
        if self.text_encoder is None or self.tokenizer is None:
            raise ValueError("this pipeline was loaded without a text encoder: pass prompt_embeds")
        if self.transformer is None and max_sequence_length is None:
            raise ValueError("this pipeline was loaded without a transformer: pass max_sequence_length, its caption rows")
        prompts = [self.read_prompt(text).text for text in prompts]
        for hint in dict.fromkeys(unreadable_hint(self.tokenizer, text) for text in prompts):
            if hint:
                logger.warning("%s", hint)
        if clean:
            prompts = [clean_caption(text) for text in prompts]
        rows = self.transformer.config.cls_token_num if max_sequence_length is None else checks.check_rows(max_sequence_length)
        warn_truncated(self.tokenizer, prompts, rows)
        encoded = self.tokenizer(prompts, padding="max_length", truncation=True, max_length=rows, return_tensors="pt")
        mask = encoded.attention_mask.to(self._execution_device)
        features = self.text_encoder(input_ids=encoded.input_ids.to(self._execution_device), attention_mask=mask)
        features = features if isinstance(features, Tensor) else features[0]
        return align_left_padded(features, mask.bool())

    def condition(
        self,
        prompt: Any = None,
        class_labels: Any = None,
        prompt_embeds: Any = None,
        prompt_mask: Any = None,
        clean: bool = False,
        name: str = "prompt",
    ) -> tuple[Condition, int]:
        """The condition of a call's prompts or classes, and how many there are. Validates before it encodes.

        Args:
            name: of the argument, for messages.
        """
        config = self.transformer.config
        if prompt_embeds is not None and not isinstance(prompt_embeds, Tensor):
            raise TypeError(f"{name}_embeds must be a tensor, got {type(prompt_embeds).__name__}")
        if prompt_mask is not None and prompt_embeds is None:
            raise ValueError(f"{name}_mask belongs to {name}_embeds, and none are given")
        if config.condition == "class":
            if name != "prompt" or prompt_embeds is not None:
                raise ValueError(f"this model draws classes: it takes class_labels, no {name}{'_embeds' * (prompt is None)}")
            if class_labels is None or prompt is not None:
                raise ValueError(f"this model draws classes: give class_labels (0 to {config.num_classes - 1}), no prompt")
            names = {int(k): v for k, v in (self.config.id2label or {}).items()}
            labels = checks.check_class_labels(class_labels, config.num_classes, names)
            return Condition(class_labels=torch.tensor(labels, device=self._execution_device)), len(labels)
        if class_labels is not None:
            raise ValueError("this model draws from text: give a prompt, not class_labels")
        if prompt_embeds is not None:
            expected = (config.cls_token_num, config.caption_dim)
            if prompt is not None or prompt_embeds.dim() != 3 or tuple(prompt_embeds.shape[1:]) != expected:
                raise ValueError(
                    f"{name}_embeds must be [B, {expected[0]}, {expected[1]}] and come without {name}, "
                    f"got {tuple(prompt_embeds.shape)}" + (f" and {name}={prompt!r:.40}" if prompt is not None else "")
                )
            embeds, mask = checks.check_embeds(prompt_embeds, prompt_mask, name)
            embeds, mask = embeds.to(self._execution_device), mask.to(self._execution_device)
            return Condition(caption_embeds=embeds, caption_mask=mask), len(embeds)
        if prompt is None:
            raise ValueError("give a prompt, for example pipe('a red apple')")
        embeds, mask = self.encode_prompt(prompt, clean)
        return Condition(caption_embeds=embeds, caption_mask=mask), len(embeds)

    # -- the call -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @outside_autocast
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        class_labels: int | str | list[int | str] | Tensor | None = None,
        num_images_per_prompt: int = 1,
        guidance_scale: float | None = None,
        guidance_interval: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | list[str] | None = None,
        accelerator: str | Accelerator = DEFAULT,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_mask: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
        compile: bool = False,
        compress_prefix: bool = True,
        clean_prompt: bool = False,
    ) -> LlamaGenPipelineOutput | tuple[Any]:
        """Draw pictures.

        Args:
            prompt: one prompt or several (`condition="text"`).
            class_labels: one class or several, by number or, where the checkpoint has them, name (`condition="class"`).
            num_images_per_prompt: pictures of each.
            guidance_scale: classifier-free guidance, at least 0; 1 switches it off. None: the checkpoint's default, as for
                `temperature` (at least 0; 0 is greedy), `top_k` (1 to the vocabulary, which keeps every token) and `top_p`
                (in (0, 1]).
            guidance_interval: guide only up to this decoding step; None guides all.
            negative_prompt: what guidance leads away from, instead of the null caption; one for all prompts, or one for each.
            accelerator: name of a preset (`vargen info presets` lists them), or an `Accelerator`. The default, `"auto"`, draws
                the picture of `"ar"` (in float32; in bfloat16 a wide pass rounds differently), drafting as far as that pays.
            generator: a `torch.Generator`, or one per picture; picture i of a list is what its generator draws alone. A single
                generator, or torch's global one for None, serves all pictures in turn. Whichever it was, a new generator with
                the seed `stats.seeds[i]`, on the same device, draws picture i again alone: the seed that was asked for, or a
                new one where the generator had moved on.
            prompt_embeds, prompt_mask: caption features `[B, P, C]`, valid rows last, and their mask (a tensor, an array or
                nested lists), instead of a prompt.
            negative_prompt_embeds, negative_prompt_mask: the same instead of a negative prompt; B is 1, or that of the prompts.
            output_type: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
            return_dict: False returns `(images,)`.
            callback_on_step_end: called as `f(pipe, step, tokens_drawn, {"latents": tokens})` after every pass. It may change
                the tokens in place or return `{"latents": ...}`; returning `{"stop": True}`, or setting `pipe._interrupt`,
                ends the run with what is drawn.
            compile: run the passes through `torch.compile`; the first call takes minutes. Not on a CPU, where it does not pay.
            compress_prefix: hold the conditioning in its one exact cache slot; False holds all its rows.
            clean_prompt: clean the prompt as official LlamaGen text models were trained (needs ftfy and beautifulsoup4).

        Raises:
            ValueError, TypeError: for bad arguments, naming the argument, the value and what is allowed.
            NonFiniteLogitsError: if the model returns NaN or infinite logits. NonFinitePixelsError: likewise the tokenizer.
        """
        if self.transformer is None or self.vqvae is None:
            raise ValueError("this pipeline was loaded without a transformer or vqvae: it only encodes prompts")
        checks.check_output_type(output_type)
        check_compile(compile, self._device_of(self.transformer))
        preset = resolve_accelerator(accelerator)
        if compile and preset.name == DEFAULT:  # which feeds many widths, each a graph of its own: the same picture by one
            preset = resolve_accelerator("gumbel")
        given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        chosen = {**self.default_sampling, **{k: v for k, v in given.items() if v is not None}}
        scale, sampling = checks.check_sampling(chosen)
        guidance_interval = checks.check_guidance_interval(guidance_interval)
        sampling.check_vocabulary(self.transformer.config.vocab_size)
        checks.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, self._callback_tensor_inputs)
        if negative_prompt is not None:
            checks.check_prompts(negative_prompt, "negative_prompt")
        num_images_per_prompt = checks.check_count(num_images_per_prompt, 1)

        condition, count = self.condition(prompt, class_labels, prompt_embeds, prompt_mask, clean_prompt)
        images = count * checks.check_count(num_images_per_prompt, count)
        seeds = checks.image_seeds(generator, images)
        condition = _repeat(condition, num_images_per_prompt)
        negative = None
        if any(given is not None for given in (negative_prompt, negative_prompt_embeds, negative_prompt_mask)):
            unwanted = (negative_prompt, None, negative_prompt_embeds, negative_prompt_mask)
            negative, given_negatives = self.condition(*unwanted, clean_prompt, "negative_prompt")
            if given_negatives not in (1, count):
                raise ValueError(f"negative_prompt must be one, or one for each of {count} prompts; got {given_negatives}")
            negative = _repeat(negative, images // given_negatives)
        self._guidance_scale, self._num_timesteps, self._interrupt = scale, self.transformer.tokens, False
        with self.progress_bar(total=self.transformer.tokens) as bar:
            callback = self._callback(bar, callback_on_step_end)

            def run(chosen: slice) -> Decoded:
                rows = negative and negative.rows(chosen)
                model = self.token_model(scale, guidance_interval, rows, compress_prefix, compile)
                return decode(model, condition.rows(chosen), seeds.noise[chosen], preset, sampling, callback=callback)

            result = within_memory(run, images)
        result.stats.seeds = seeds.asked
        output = self.decode_tokens(result.tokens, result.length if result.stats.stopped else None, output_type)
        self.maybe_free_model_hooks()
        return LlamaGenPipelineOutput(images=output, stats=result.stats) if return_dict else (output,)

    def token_model(
        self,
        guidance_scale: float,
        guidance_interval: int | None = None,
        negative: Condition | None = None,
        compress_prefix: bool = True,
        compile: bool = False,
    ) -> LlamaGenTokens:
        """The transformer, and the one it may draft with, as `vargen.decoding.decode` sees them; arguments as in a call.

        Raises:
            ValueError: for a bad scale, or `compile` on a CPU.
        """
        check_compile(compile, self._device_of(self.transformer))
        options = (checks.check_guidance(guidance_scale), guidance_interval, negative, compress_prefix)
        device = self._device_of(self.transformer)
        draft = None if self.draft_transformer is None else LlamaGenTokens(self.draft_transformer, *options, device=device)
        codes = self.vqvae.quantize.codebook().to(device)
        step = self._step() if compile else None
        return LlamaGenTokens(self.transformer, *options, step, codebook=codes, draft_model=draft, device=device)

    def _device_of(self, component: Any) -> torch.device:
        """Where a component's passes run: not where its weights lie, while diffusers offloads them to the CPU."""
        offloaded = component.device.type == "meta" or hasattr(component, "_hf_hook")
        return self._execution_device if offloaded else component.device

    def _callback(self, bar: Any, on_step_end: Any) -> Callable[[Progress], bool | None]:
        """Feeds the progress bar, and the caller's callback with diffusers' arguments."""

        def callback(progress: Progress) -> bool | None:
            # Reading a length waits for the device: on CUDA only now and then.
            if progress.tokens.device.type == "cpu" or progress.step % 16 == 0 or on_step_end is not None:
                drawn = int(progress.length.amin())
                bar.update(drawn - bar.n)
            if on_step_end is None:
                return not self._interrupt
            answer = on_step_end(self, progress.step - 1, drawn, {"latents": progress.tokens})
            answer = checks.check_answer(answer, progress.tokens, self.transformer.config.vocab_size)
            latents = answer.get("latents")
            if latents is not None and latents is not progress.tokens:
                progress.tokens.copy_(latents)
            return not (answer.get("stop", False) or self._interrupt)

        return callback

    def _step(self) -> Any:
        if self._compiled is None or self._compiled._orig_mod is not self.transformer:
            self._compiled = torch.compile(self.transformer, dynamic=False)
        return self._compiled

    @torch.no_grad()
    @outside_autocast
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Pictures of tokens int64 `[B, N]` or `[B, rows, columns]`; what lies past `length [B]` is left white.

        Also a preview of a picture that is still being drawn.

        Raises:
            ValueError, TypeError: for tokens that are none of this model's, or an unknown output type.
            NonFinitePixelsError: with the picture and place of the first NaN or infinite pixel.
        """
        checks.check_output_type(output_type)
        side = self.transformer.config.grid_size
        checks.check_tokens(tokens, self.vqvae.config.codebook_size)
        if tokens.dim() not in (2, 3) or not len(tokens) or tokens[0].numel() != side**2:
            raise ValueError(f"tokens must be [B, {side**2}] or [B, {side}, {side}], got {list(tokens.shape)}")
        if length is not None and tuple(length.shape) != (len(tokens),):
            raise ValueError(f"length must be [{len(tokens)}], one per picture, got {list(length.shape)}")
        tokens = tokens.reshape(-1, side, side)
        if output_type == "latent":
            return tokens
        pixels = self._pixels(tokens.to(self._device_of(self.vqvae)))
        NonFinitePixelsError.check(pixels)
        if length is not None:
            drawn = torch.arange(side * side, device=pixels.device) < length.to(pixels.device)[:, None]
            mask = drawn.view(-1, 1, side, side).repeat_interleave(self.vqvae.downsampling, 2)
            pixels = torch.where(mask.repeat_interleave(self.vqvae.downsampling, 3), pixels, 1.0)
        return self.image_processor.postprocess(pixels.clamp(-1, 1), output_type=output_type)

    def _pixels(self, tokens: Tensor) -> Tensor:
        """Float32 `[B, 3, Y, X]` of tokens; by halves where memory does not hold all of them: drawn tokens are not lost to it.

        Raises:
            torch.OutOfMemoryError: if not even one picture fits.
        """
        try:
            return self.vqvae.decode(tokens).float()
        except torch.OutOfMemoryError as error:
            if len(tokens) == 1:
                raise torch.OutOfMemoryError(
                    "out of memory decoding the pixels of one image; output_type='latent' returns its tokens"
                ) from error
        logger.warning("out of memory decoding %d images at once: decoding them in two halves", len(tokens))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return torch.cat([self._pixels(half) for half in tokens.tensor_split(2)])

    @torch.no_grad()
    @outside_autocast
    def encode_image(self, images: Any) -> Tensor:
        """Tokens int64 `[B, rows, columns]` of PIL images or float `[B, 3, Y, X]` in [0, 1], resized to the model's size.

        Raises:
            ValueError, TypeError: for what is no picture, or one with NaN or infinite values.
            NonFinitePixelsError: if the tokenizer makes NaN or infinite values of finite ones.
        """
        side = self.transformer.config.grid_size * self.vqvae.downsampling
        if not isinstance(images, Tensor | np.ndarray):
            images = list(images) if isinstance(images, list | tuple) else [images]
            if not images or not all(isinstance(image, Image.Image) for image in images):
                raise TypeError(f"images must be PIL images, or a float tensor [B, 3, Y, X] in [0, 1], got {shown(images)}")
            images = [image.convert("RGB") for image in images]
        elif images.ndim not in (3, 4) or not len(images):
            raise ValueError(f"images must be [B, 3, Y, X] as a tensor, [B, Y, X, 3] as an array, got {list(images.shape)}")
        pixels = self.image_processor.preprocess(images, height=side, width=side)
        if not pixels.isfinite().all():
            raise ValueError("images must hold finite values, from 0 to 1, and hold NaN or infinite ones")
        return self.vqvae.encode(pixels.to(self._device_of(self.vqvae), self.vqvae.dtype))


def _repeat(condition: Condition, count: int) -> Condition:
    """Each row `count` times, in place: prompt 0's images first."""
    parts = (condition.class_labels, condition.caption_embeds, condition.caption_mask)
    return Condition(*(None if part is None else part.repeat_interleave(count, dim=0) for part in parts))
