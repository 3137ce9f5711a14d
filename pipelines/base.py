"""What pipelines of every family share: opening and saving, reading prompts, and saying which methods they can run.

Command, page and evaluation use this interface alone, so that a family is named in its own file and nowhere above.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor

from vargen.compat import ensure_torchvision
from vargen.decoding import DEFAULT, methods_of, resolve_accelerator
from vargen.files import expanded, whole_files

# from_pretrained finds this class by module path, so the module must have been imported.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.pipelines.borrowed import FILE as BORROWED_FILE
from vargen.pipelines.borrowed import lenders, load_borrowed
from vargen.pipelines.conditioning import Conditioning
from vargen.pipelines.description import Decoder, Description, Method
from vargen.pipelines.drafter_files import checked_drafter
from vargen.pipelines.examples import FILE as EXAMPLES_FILE
from vargen.pipelines.examples import check_examples, read_examples, write_examples
from vargen.pipelines.families import FAMILIES
from vargen.pipelines.loading import checked_folder, component_dtypes
from vargen.pipelines.parts import check_parts
from vargen.pipelines.prompt_names import FILE as NAMES_FILE
from vargen.pipelines.prompt_names import PromptNames

ensure_torchvision()

import diffusers
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor

_RELEASE = tuple(int(part) for part in diffusers.__version__.split(".")[:2])
_DTYPE = "dtype" if _RELEASE >= (0, 42) else "torch_dtype"  # what diffusers calls it


class VisualPipeline(Conditioning, DiffusionPipeline):
    """Text or class to picture, with an autoregressive model of any family.

    A family implements `__call__` and the abstract methods below.

    Attributes:
        family: which presets it runs; see `vargen.decoding.Accelerator`.
        output: class of a call's result, of `images` and `stats`.
        baseline: preset that ratios of speed are against. default_method: what a call draws with.
        usual_sampling: where neither a call nor a checkpoint says another.
    """

    family: ClassVar[str]
    output: ClassVar[Any]
    baseline: ClassVar[str] = "ar"
    default_method: ClassVar[str] = DEFAULT
    usual_sampling: ClassVar[dict[str, Any]] = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0}
    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["draft_transformer"]  # small, and it takes turns with the transformer
    _optional_components: ClassVar[list[str]] = ["text_encoder", "tokenizer", "draft_transformer"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    transformer: Any
    vqvae: Any
    draft_transformer: Any
    text_encoder: Any
    tokenizer: Any

    def _set_up(self, parts: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Check the parts and the values kept beside them, and register both; the body of every `__init__`.

        Raises:
            ValueError: for parts that do not belong together, class names, defaults or styles that a call could not use.
        """
        configs = {name: getattr(part, "config", None) for name, part in parts.items()}
        check_parts(FAMILIES[type(self).__name__], configs, **config)
        DiffusionPipeline.__init__(self)
        self.register_modules(**parts)
        self.register_to_config(**config)
        # Opened with transformer=None and vqvae=None, a pipeline still encodes prompts.
        factor = 8 if self.vqvae is None else self.vqvae.downsampling
        self.image_processor = VaeImageProcessor(vae_scale_factor=factor)
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        self.examples: Tensor | None = None
        self._guidance_scale, self._num_timesteps, self._interrupt = 1.0, 0, False
        self._compiled: Any = None

    # -- opening and saving ---------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Open a packaged model by name (no network), a folder, or a model of the hub (`"owner/name"`).

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
            kwargs["prompt_names"] = PromptNames.read(lenders(folder).get("prompt_names", folder))
        examples = read_examples(folder)
        kwargs |= load_borrowed(folder, kwargs)
        pipe = super().from_pretrained(str(folder), **kwargs)
        if examples is not None and pipe.transformer is not None:
            check_examples(examples, pipe.vocab, pipe.tokens)
        pipe.examples = examples
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """As diffusers has it; `prompt_names` and `examples`, which are no part of the config, go along."""
        kwargs.setdefault("prompt_names", getattr(pipeline, "prompt_names", None))
        pipe = super().from_pipe(pipeline, **kwargs)
        pipe.examples = getattr(pipeline, "examples", None)
        return pipe

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
            if self.examples is not None:
                write_examples(self.examples, staged)
        if self.examples is None:
            (folder / EXAMPLES_FILE).unlink(missing_ok=True)  # as below
        (folder / BORROWED_FILE).unlink(missing_ok=True)  # of another model that was saved here
        if self.prompt_names is None:
            (folder / NAMES_FILE).unlink(missing_ok=True)

    def load_drafter(self, drafter: Any) -> str:
        """Open a drafter that was trained for this model, as `vargen train drafter` makes them, and draft with it from now on.

        Saving the pipeline saves it along, as one of its components, so that opening it again needs no `load_drafter`.

        Args:
            drafter: a folder, or the name of a packaged one, such as `"emoji/eagle"`.

        Returns:
            Which component it became: `"eagle"`, say.

        Raises:
            ValueError: for no trained drafter, one of another width, vocabulary or grid than the transformer, damaged files, or
                a folder that holds code; before a weight is read.
        """
        if self.transformer is None:
            raise ValueError("this pipeline was loaded without a transformer: there is nothing to draft for")
        family = FAMILIES[type(self).__name__]
        component, folder = checked_drafter(drafter, family, self.transformer.config)
        kind: Any = family.networks[component]
        network = kind.from_pretrained(folder, torch_dtype=self.transformer.dtype, use_safetensors=True)
        self.register_modules(**{component: network.to(self._device_of(self.transformer)).eval()})
        return component

    # -- what it is -----------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> Description:
        """What a checked folder of this family says, `index` being its `model_index.json`."""

    @classmethod
    @abstractmethod
    def check_method(cls, described: Description, method: Any) -> None:
        """Raise ValueError if a model that a folder describes cannot run a method; what weights would tell is not asked."""

    @abstractmethod
    def check_runs(self, method: Any) -> None:
        """Raise ValueError if this pipeline cannot run a method, saying why."""

    @abstractmethod
    def decoder(self, settings: Mapping[str, Any]) -> Decoder:
        """Draws tokens with these `guidance_scale`, `temperature`, `top_k`, `top_p`; those not given are the checkpoint's."""

    @abstractmethod
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Pictures of tokens `[B, N]`; what lies past `length [B]` is left white."""

    @abstractmethod
    def preview(self, tokens: Tensor, drawn: int) -> list[Image.Image]:
        """Pictures of which the first `drawn` tokens of `[B, N]` are there; transparent where nothing can be seen yet."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Tokens V to draw from."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens N of a picture."""

    @property
    @abstractmethod
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens of a picture, in drawing order, raster order in each: one grid, or one per scale."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the finest, or only, grid."""
        return self.grids[-1]

    @property
    @abstractmethod
    def steps(self) -> int:
        """Passes that the baseline takes for a picture."""

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """Float `[V, C]`, vectors that say how alike two tokens are."""

    def methods(self) -> list[Method]:
        """The presets of this family: name, exact or relaxed, and the reason if this pipeline cannot run it."""
        found = []
        for preset in methods_of(self.family):
            reason = None
            try:
                self.check_runs(preset)
            except (ValueError, TypeError) as error:
                reason = str(error)
            found.append(Method(preset.name, preset.kind, preset.summary, preset.source, reason))
        return found

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance, temperature and filters where a call gives none: the checkpoint's own, else the family's."""
        stored = {name: value for name, value in (self.config.defaults or {}).items() if value is not None}
        usual = dict(self.usual_sampling)
        if usual["top_k"] is not None and usual["top_k"] > self.vocab:
            usual["top_k"] = None
        return {**usual, **stored}

    @property
    def guidance_scale(self) -> float:
        """Of the call that runs, or ran last; as the next three are."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale != 1.0

    @property
    def num_timesteps(self) -> int:
        """Steps that a call takes at most."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether someone set `_interrupt`, which ends the calls that run with what is drawn."""
        return self._interrupt

    # -- the call -------------------------------------------------------------------------------------------------------

    def resolved(self, accelerator: Any) -> Any:
        """A preset by name, or the object itself, of this family.

        Raises:
            ValueError, TypeError: for anything else.
        """
        return resolve_accelerator(accelerator, self.family)

    def _device_of(self, component: Any) -> torch.device:
        """Where a component's passes run: not where its weights lie, while diffusers offloads them to the CPU."""
        offloaded = component.device.type == "meta" or hasattr(component, "_hf_hook")
        return self._execution_device if offloaded else component.device

    def _step(self) -> Any:
        """The transformer, compiled."""
        if self._compiled is None or self._compiled._orig_mod is not self.transformer:
            self._compiled = torch.compile(self.transformer, dynamic=False)
        return self._compiled
