"""`VisualPipeline`, the base class of the pipelines of all families: loading, saving, methods and calls.

The command line, the demo page and the evaluation use only this interface, so no code above `pipelines/` names a family.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from vargen.compat import ensure_torchvision, without_autocast
from vargen.decoding import DEFAULT_METHOD, Accelerator, Sampling, list_methods, resolve_method
from vargen.files import atomic_merge, expand_user
from vargen.models.guidance import Guidance
from vargen.pipelines import loading, prompts, validation
from vargen.pipelines.engines import KeptEngines
from vargen.pipelines.families import STORED_VALUES, ModelFamily
from vargen.pipelines.generation import ImageRequest, RunningCalls
from vargen.pipelines.offloading import OffloadedPipeline
from vargen.pipelines.prompts import NormalizedPrompt, PromptNames
from vargen.scoring.protocol import Scorer, to_scorer
from vargen.scoring.registry import open_scorer
from vargen.values import require_int, short_repr

ensure_torchvision()

from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class MethodInfo:
    """A preset, and whether a pipeline supports it.

    Attributes:
        name, kind, summary, source: from the preset; kind is `"exact"` or `"relaxed"`.
        unsupported_reason: why this pipeline cannot run it; None if it can.
    """

    name: str
    kind: str
    summary: str
    source: str
    unsupported_reason: str | None = None


class VisualPipeline(OffloadedPipeline, DiffusionPipeline):
    """Generation of images or videos with an autoregressive model of any family.

    A family implements `__call__` and the abstract methods below.

    Attributes:
        family: registration of the family; `register_family` sets it.
        paradigm: selects the presets that this pipeline runs: next-token, next-scale or video.
        output_class: class of a call's result.
        baseline: name of the preset that speedups are relative to.
        default_method: name of the preset that a call uses by default.
        pixel_decoder: name of the component that decodes tokens or latents to pixels.
        usual_sampling: sampling settings used where neither the call nor the checkpoint sets them.
        prompt_names: names that replace characters in a prompt; None if prompts are used as typed.
        fps: frames per second of video models.
        makes_images: False if another pipeline decodes the tokens.
        folder: the folder that it was opened from; None if its components come from elsewhere.
    """

    family: ClassVar[ModelFamily]
    paradigm: ClassVar[str]
    output_class: ClassVar[Any]
    baseline: ClassVar[str] = "ar"
    default_method: ClassVar[str] = DEFAULT_METHOD
    pixel_decoder: ClassVar[str] = "vqvae"
    usual_sampling: ClassVar[dict[str, Any]] = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0}
    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    transformer: Any
    vqvae: Any
    draft_transformer: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
    prompt_names: PromptNames | None = None
    fps: int | None = None
    makes_images: bool = True
    folder: Any = None

    def _register_components(self, components: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Validate and register the components and the values stored with them. This is the body of every `__init__`."""
        known = self.family.components
        if unknown := {name for name, component in components.items() if component is not None} - known.keys():
            raise TypeError(f"{min(unknown)} is no component of a {type(self).__name__}: {', '.join(known)}")
        components = {name: components.get(name) for name in known}
        self.family.check({name: getattr(component, "config", None) for name, component in components.items()}, **config)
        super().__init__()
        self.register_modules(**components)
        self.register_to_config(**config)
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        # A pipeline loaded without networks can still encode prompts.
        factor = getattr(getattr(self, self.pixel_decoder), "downsampling", 8)
        self.image_processor = VaeImageProcessor(vae_scale_factor=factor)
        self._init_calls()

    def _init_calls(self) -> None:
        """Create what calls use beside the components."""
        self._scorers: dict[tuple[str, torch.device], Scorer] = {}
        self._calls = RunningCalls()
        self._engines = KeptEngines()

    # -- loading and saving ---------------------------------------------------------------------------------------------

    @classmethod
    @without_autocast
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        quantization: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a packaged model by name (without network access), a local folder, or a Hub model (`"owner/name"`).

        Args:
            torch_dtype, dtype: dtype of the transformer and of a large text encoder, or a dict of dtypes by component; the
                two are the old and the new name in diffusers. Default: bfloat16 on machines with CUDA and on CPUs with
                hardware bfloat16 multiplication, else float32. The image tokenizer stays in float32, as trained.
            quantization: `"int8"` runs transformers on a CPU with 8-bit integer products, in a quarter of the memory; their
                other steps are float32. Images differ from those of float32 in detail, and are the same for each exact method
                and batch. Default: the format of the folder.
            **kwargs: `variant` of the names of weight files; components that replace stored ones, or None to leave one out;
                values that replace stored ones, such as `defaults`; `cache_dir`, `force_download`, `local_files_only`, `token`
                and `revision` of the hub.

        Raises:
            ValueError: before any weight is loaded, for invalid dtypes, an unknown name, a folder without `model_index.json`,
                or a component that is missing, damaged or does not match the others.
            TypeError: for an unknown argument.
            MemoryError: if the weights do not fit in memory; the message reports their size in bytes.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        model = loading.read_model_folder(pretrained_model_name_or_path, cls.family, kwargs)
        names = kwargs["prompt_names"] if "prompt_names" in kwargs else loading.load_prompt_names(model)
        parts = loading.load_components(model, torch_dtype if dtype is None else dtype, quantization, kwargs)
        pipe = cls._from_folder(model, parts, names)
        if any(kwargs.get(name) is not None for name in cls.family.components):
            pipe.folder = None  # which does not describe it
        return pipe

    @classmethod
    def inspect(cls, folder: Path) -> Self:
        """Return the pipeline of a folder without weights; see `vargen.pipelines.loading.inspect_model`."""
        model = loading.read_model_folder(folder, cls.family)
        return cls._from_folder(model, loading.make_components(model), loading.load_prompt_names(model))

    @classmethod
    def _from_folder(cls, model: loading.ModelFolder, parts: Mapping[str, Any], prompt_names: Any) -> Self:
        pipe = cls(**parts, **model.values, prompt_names=prompt_names)
        pipe.register_to_config(_name_or_path=str(model.path))
        pipe.folder = model.path
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **changed: Any) -> Self:
        """Return a pipeline that shares the components of another, and the values stored with them.

        Args:
            pipeline: of the same class.
            **changed: components and values that replace those of the other.
        """
        if not isinstance(pipeline, cls):
            raise TypeError(f"pipeline must be a {cls.__name__}, got {type(pipeline).__name__}")
        pipe = cls(**{**pipeline.components, **changed})
        if not any(changed.get(name) is not None for name in cls.family.components):
            pipe.folder = pipeline.folder
        return pipe

    @property
    def components(self) -> dict[str, Any]:
        """The components by name, None for a missing one, and the values stored with them that are set.

        `type(pipe)(**pipe.components)` generates what `pipe` does.
        """
        values = {name: self.config.get(name) for name in STORED_VALUES} | {"prompt_names": self.prompt_names}
        return {**super().components, **{name: value for name, value in values.items() if value is not None}}

    @classmethod
    def _get_signature_keys(cls, obj: Any) -> tuple[set[str], set[str]]:
        """As in diffusers, which takes them from the constructor: the components, and the other arguments."""
        return set(cls.family.components), {*STORED_VALUES, "prompt_names"}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` can load. Files are written atomically, and none is written if saving fails.

        Args:
            save_directory: created if missing. Other files in it are kept, except those of a model saved there earlier.
            **kwargs: passed to `DiffusionPipeline.save_pretrained`.

        Raises:
            ValueError: while weights are offloaded layer by layer.
            OSError: if the folder cannot be created or written.
        """
        self.require_weights("saved")
        folder = expand_user(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_merge(folder) as staged:
            super().save_pretrained(str(staged), **kwargs)
            if self.prompt_names is not None:
                self.prompt_names.save(staged)
        own = {
            prompts.PROMPT_NAMES_FILE: self.prompt_names,
            loading.SHARED_FILE: None,
        }
        for name in (name for name, value in own.items() if value is None):
            (folder / name).unlink(missing_ok=True)

    def load_drafter(self, drafter: Any, *others: Any) -> str:
        """Load a network that `vargen train drafter` trained for this model, and use it in later calls.

        It becomes a component of the pipeline: `save_pretrained` writes it and `from_pretrained` restores it.

        Args:
            drafter: folder of the training run or of the saved network, or the name of a packaged one, such as `"emoji/eagle"`.
            others: further ones, such as the up-sampler of a low-resolution transformer. All are loaded, or none.

        Returns:
            Name of the component of `drafter`, such as `"eagle"`.

        Raises:
            ValueError: before any weight is read, if a folder holds no such network, damaged files, or if the network
                does not match the transformer.
        """
        if self.transformer is None:
            raise ValueError("this pipeline was loaded without a transformer: there is nothing to draft for")
        networks, device = loading.load_trained_networks(self, drafter, *others), self._device_of(self.transformer)
        self.register_modules(**{name: network.to(device) for name, network in networks.items()})
        return next(iter(networks))

    # -- methods --------------------------------------------------------------------------------------------------------

    def validate_method(self, method: Any) -> None:
        """Raise ValueError with the reason if this pipeline cannot run a method; also of a pipeline without weights."""
        if isinstance(method, Accelerator):
            validation.validate_draft_size(method, self.num_tokens)
        method.bind(self.decoding_model())

    def list_methods(self) -> list[MethodInfo]:
        """List the presets of this paradigm, each with its name, kind, and the reason if this pipeline cannot run it."""
        found = []
        for preset in list_methods(self.paradigm):
            reason = None
            try:
                self.validate_method(preset)
            except (ValueError, TypeError) as error:
                reason = str(error)
            found.append(MethodInfo(preset.name, preset.kind, preset.summary, preset.source, reason))
        return found

    def resolve_method(self, accelerator: Any) -> Any:
        """Return the method for a preset name, or the given method itself, if it belongs to this paradigm and fits the grid."""
        method = resolve_method(accelerator, self.paradigm)
        if isinstance(method, Accelerator):
            validation.validate_draft_size(method, self.num_tokens)
        return method

    @abstractmethod
    def decoding_model(self, *arguments: Any, **options: Any) -> Any:
        """Return the adapter of the transformers for the loop of this paradigm.

        Args:
            guidance: for image models, classifier-free guidance or its scale.

        Raises:
            ValueError: for an invalid guidance scale.
        """

    # -- prompts and classes --------------------------------------------------------------------------------------------

    @property
    def is_class_conditional(self) -> bool:
        """Whether the model is conditioned on classes instead of text."""
        return self.transformer.config.get("condition") == "class"

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for models of text."""
        return self.transformer.config.get("num_classes") or 0 if self.is_class_conditional else 0

    @property
    def reads_prompts(self) -> bool:
        """Whether it encodes prompts itself."""
        return self.text_encoder is not None

    @property
    def class_names(self) -> dict[int, str]:
        """Comma-separated synonyms by class number; empty if the checkpoint has no class names."""
        return {int(number): names for number, names in (self.config.get("id2label") or {}).items()}

    @property
    @abstractmethod
    def max_caption_tokens(self) -> int:
        """Maximum number of caption tokens that the transformer accepts."""

    def normalize_prompt(self, prompt: str) -> NormalizedPrompt:
        """Replace characters by their names (see `prompt_names`). `names` of the result maps the typed characters to names."""
        return NormalizedPrompt(prompt, {}) if self.prompt_names is None else self.prompt_names.apply(prompt)

    encode_prompt = prompts.encode_prompt

    encode_condition = prompts.encode_condition

    def named_scorer(self, name: str) -> Scorer:
        """Return the scorer with this name, loaded on first use; see `vargen.scoring.open_scorer`."""
        key = (name, self._execution_device)
        if key not in self._scorers:
            self._scorers[key] = open_scorer(*key)
        return self._scorers[key]

    # -- images ---------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V."""
        return self.transformer.config.vocab_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of an image."""
        return self.transformer.tokens

    @property
    @abstractmethod
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of an image's token grids in generation order, each in raster order: one, or one per scale."""

    @property
    def image_size(self) -> int | None:
        """Width and height in pixels of the source image of a call; None if calls take no image."""
        return None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the only grid, or of the finest one."""
        return self.grids[-1]

    @property
    @abstractmethod
    def num_baseline_passes(self) -> int:
        """Number of forward passes that the baseline takes for an image."""

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """Float `[V, C]`: embeddings whose distances measure how similar two tokens are."""

    @abstractmethod
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens `[B, N]` to images. The area of tokens past `length [B]` is left white, or not refined further.

        Raises:
            ValueError, TypeError: for tokens that do not fit this model, or an unknown output type.
            NonFinitePixelsError: for NaN or infinite pixels; the message has the image and position of the first one.
        """

    @abstractmethod
    def preview(self, tokens: Tensor, num_tokens: int) -> list[Image.Image]:
        """Decode the first `num_tokens` of tokens `[B, N]` to partial images, transparent where nothing has been generated."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance scale, temperature, top-k and top-p that a call uses by default: the checkpoint's, else the family's."""
        stored = {name: value for name, value in (self.config.defaults or {}).items() if value is not None}
        usual = dict(self.usual_sampling)
        if usual["top_k"] is not None and usual["top_k"] > self.vocab_size:
            usual["top_k"] = None
        return {**usual, **stored}

    # -- calls ----------------------------------------------------------------------------------------------------------

    def joins_running_batch(self, method: Any) -> bool:
        """Whether images can join a batch while others are generated. Otherwise they are generated batch by batch, as those of
        next-scale models, whose passes differ in shape."""
        return False

    def check_inputs(
        self,
        output_type: Any = "pil",
        callback: Any = None,
        tensor_inputs: Any = None,
        num_candidates: Any = 1,
        scorer: Any = None,
        batch_size: Any = None,
    ) -> Scorer | None:
        """Validate arguments of a call that each stand for themselves; returns the scorer."""
        self.require_loaded()
        if self.transformer is None or getattr(self, self.pixel_decoder) is None:
            missing = f"transformer or {self.pixel_decoder}"
            raise ValueError(f"this pipeline was loaded without a {missing}: it only encodes prompts")
        if output_type not in validation.OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(validation.OUTPUT_TYPES)}, got {short_repr(output_type)}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback_on_step_end must be a function, or None, got {short_repr(callback)}")
        known, named = self._callback_tensor_inputs, () if tensor_inputs is None else tensor_inputs
        if not isinstance(named, list | tuple | set | frozenset) or any(name not in known for name in named):
            raise ValueError(f"callback_on_step_end_tensor_inputs must be among {known}, got {short_repr(tensor_inputs)}")
        if batch_size is not None:
            validation.validate_batch_size(batch_size, "batch_size")
        if require_int("num_candidates", num_candidates, 1) > 1 and scorer is None:
            raise ValueError(
                f"scorer must be given to choose among {num_candidates} candidates: a name, a Scorer or f(images, prompts)"
            )
        if scorer is None or not isinstance(scorer, str):
            return scorer and to_scorer(scorer)
        return self.named_scorer(scorer)

    def resolve_sampling(self, guidance_interval: Any = None, **given: Any) -> tuple[Guidance, Sampling]:
        """Return guidance and sampling options of a call; None selects the checkpoint's default."""
        settings = {**self.default_sampling, **{name: value for name, value in given.items() if value is not None}}
        guidance = Guidance(settings.pop("guidance_scale"), guidance_interval)
        sampling = Sampling(**settings)
        sampling.validate_top_k(self.vocab_size)
        return guidance, sampling

    @abstractmethod
    def _decode(self, request: ImageRequest, callback: Any) -> Any:
        """Run the loop of this paradigm."""

    @property
    def interrupt(self) -> bool:
        """Whether this thread's call, or in a thread without a call any running call, was interrupted."""
        return any(call.interrupted for call in self._calls.current())

    @property
    def _interrupt(self) -> bool:
        """As in diffusers. Setting it in a callback stops that call; setting it in another thread stops all running calls."""
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool) -> None:
        for call in self._calls.current():
            call.interrupted = value
