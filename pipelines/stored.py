"""Pipelines as files, and as what they can run: opening and saving, and the methods of their family; for pictures and video."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.compat import ensure_torchvision
from vargen.decoding import list_methods, resolve_method
from vargen.files import atomic_merge, expand_user

# from_pretrained finds this class by module path, so the module must have been imported.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.pipelines.call_arguments import answering, names_of
from vargen.pipelines.components import FAMILIES, current_modules
from vargen.pipelines.examples import FILE as EXAMPLES_FILE
from vargen.pipelines.examples import check_examples, read_examples, write_examples
from vargen.pipelines.generation import loading_memory
from vargen.pipelines.loading import FILE as BORROWED_FILE
from vargen.pipelines.loading import check_model_folder, load_shared_components, resolve_dtypes, shared_component_folders
from vargen.pipelines.model_info import Method, ModelInfo
from vargen.pipelines.parts import check_parts
from vargen.pipelines.prompt_names import FILE as NAMES_FILE
from vargen.pipelines.prompt_names import PromptNames
from vargen.pipelines.prompts import Conditioning
from vargen.pipelines.quiet import no_bar, placing
from vargen.scoring.protocol import Scorer
from vargen.scoring.registry import open_scorer

ensure_torchvision()

import diffusers
from diffusers import DiffusionPipeline

_RELEASE = tuple(int(part) for part in diffusers.__version__.split(".")[:2])
_DTYPE = "dtype" if _RELEASE >= (0, 42) else "torch_dtype"  # what diffusers calls it


class StoredPipeline(Conditioning, DiffusionPipeline):
    """A pipeline of any family.

    Attributes:
        family: which presets it runs; see `vargen.decoding.Accelerator`.
        baseline: preset that ratios of speed are against. default_method: what a call draws with.
        examples: of models of pictures, tokens to look up.
    """

    paradigm: ClassVar[str]
    baseline: ClassVar[str]
    default_method: ClassVar[str]
    examples: Tensor | None = None

    transformer: Any
    draft_transformer: Any
    text_encoder: Any
    tokenizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        calls = ("__call__", "stream")  # a call of video passes options on to `stream`, one of a subclass to its parent's
        taken = names_of(*(vars(each)[name] for each in cls.__mro__ for name in calls if name in vars(each)))
        for name in calls:
            if name in vars(cls):
                setattr(cls, name, answering(vars(cls)[name], taken))

    def _register(self, parts: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Check the parts and the values kept beside them, and register both; begins the body of every `__init__`.

        Raises:
            ValueError: for parts that do not belong together, class names, defaults or styles that a call could not use.
        """
        configs = {name: getattr(part, "config", None) for name, part in parts.items()}
        check_parts(FAMILIES[type(self).__name__], configs, **config)
        DiffusionPipeline.__init__(self)
        self.register_modules(**parts)
        self.register_to_config(**config)
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        self.examples = None
        self._scorers: dict[tuple[str, torch.device], Scorer] = {}

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
            TypeError: for an argument of another name.
            MemoryError: naming the bytes of the weights, if memory does not hold them.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        folder = check_model_folder(pretrained_model_name_or_path, cls.__name__, kwargs)
        with loading_memory(folder):
            kwargs[_DTYPE] = resolve_dtypes(folder, torch_dtype if dtype is None else dtype)
        kwargs.setdefault("use_safetensors", True)
        if "prompt_names" not in kwargs:
            kwargs["prompt_names"] = PromptNames.read(shared_component_folders(folder).get("prompt_names", folder))
        with loading_memory(folder), no_bar(folder):
            examples = read_examples(folder)
            kwargs |= load_shared_components(folder, kwargs)
            pipe = super().from_pretrained(str(folder), **{**placing(), **kwargs})
        if examples is not None and pipe.transformer is not None:
            network: Any = pipe
            check_examples(examples, network.vocab, network.tokens)
        pipe.examples = examples
        return pipe

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As diffusers has it, with the modules of components where they are now."""
        loaded: Any = super().load_config(*args, **kwargs)
        return (current_modules(loaded[0]), *loaded[1:]) if isinstance(loaded, tuple) else current_modules(loaded)

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
        folder = expand_user(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_merge(folder) as staged:
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

    # -- what it is -----------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> ModelInfo:
        """What a checked folder of this family says, `index` being its `model_index.json`."""

    @classmethod
    @abstractmethod
    def check_method(cls, described: ModelInfo, method: Any) -> None:
        """Raise ValueError if a model that a folder describes cannot run a method; what weights would tell is not asked."""

    @abstractmethod
    def check_runs(self, method: Any) -> None:
        """Raise ValueError if this pipeline cannot run a method, saying why."""

    def methods(self) -> list[Method]:
        """The presets of this family: name, exact or relaxed, and the reason if this pipeline cannot run it."""
        found = []
        for preset in list_methods(self.paradigm):
            reason = None
            try:
                self.check_runs(preset)
            except (ValueError, TypeError) as error:
                reason = str(error)
            found.append(Method(preset.name, preset.kind, preset.summary, preset.source, reason))
        return found

    def resolved(self, accelerator: Any) -> Any:
        """A preset by name, or the object itself, of this family.

        Raises:
            ValueError, TypeError: for anything else.
        """
        return resolve_method(accelerator, self.paradigm)

    def named_scorer(self, name: str) -> Scorer:
        """The scorer of that name, opened at its first use; see `vargen.scoring.open_scorer`."""
        key = (name, self._execution_device)
        if key not in self._scorers:
            self._scorers[key] = open_scorer(*key)
        return self._scorers[key]

    def _device_of(self, component: Any) -> torch.device:
        """Where a component's passes run: not where its weights lie, while diffusers offloads them to the CPU."""
        offloaded = component.device.type == "meta" or hasattr(component, "_hf_hook")
        return self._execution_device if offloaded else component.device
