"""`StoredPipeline`: loading, saving and the list of supported methods, for image and video pipelines."""

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

# Imported for its side effect: from_pretrained finds this class by module path.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.pipelines.call_arguments import answering, names_of
from vargen.pipelines.components import ModelFamily, current_modules
from vargen.pipelines.generation import loading_memory
from vargen.pipelines.loading import (
    EXAMPLES_FILE,
    SHARED_FILE,
    check_example_tokens,
    check_model_folder,
    load_example_tokens,
    load_shared_components,
    resolve_dtypes,
    save_example_tokens,
    shared_component_folders,
)
from vargen.pipelines.model_info import Method, ModelInfo
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
_DTYPE = "dtype" if _RELEASE >= (0, 42) else "torch_dtype"  # argument name of diffusers


class StoredPipeline(Conditioning, DiffusionPipeline):
    """Base class of the pipelines of all families.

    Attributes:
        family: registration of the family; `register_family` sets it.
        paradigm: selects the presets that this pipeline runs; see `vargen.decoding.Accelerator`.
        baseline: name of the preset that speedups are relative to.
        default_method: name of the preset that a call uses by default.
        examples: for image models, example tokens for lookup drafters.
    """

    family: ClassVar[ModelFamily]
    paradigm: ClassVar[str]
    baseline: ClassVar[str]
    default_method: ClassVar[str]
    examples: Tensor | None = None

    transformer: Any
    draft_transformer: Any = None
    text_encoder: Any
    tokenizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        calls = ("__call__", "stream")  # a video call forwards options to `stream`, an override forwards them to its parent
        taken = names_of(*(vars(each)[name] for each in cls.__mro__ for name in calls if name in vars(each)))
        for name in calls:
            if name in vars(cls):
                setattr(cls, name, answering(vars(cls)[name], taken))

    def _register(self, parts: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Validate and register the components and the values stored with them. Every `__init__` starts with it.

        Raises:
            ValueError: for components that do not match each other, or class names, defaults or styles that are not valid.
        """
        if unknown := {name for name, part in parts.items() if part is not None} - self.family.components.keys():
            raise TypeError(f"{min(unknown)} is no component of a {type(self).__name__}: {', '.join(self.family.components)}")
        parts = {name: parts.get(name) for name in self.family.components}
        self.family.check({name: getattr(part, "config", None) for name, part in parts.items()}, **config)
        DiffusionPipeline.__init__(self)
        self.register_modules(**parts)
        self.register_to_config(**config)
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        self.examples = None
        self._scorers: dict[tuple[str, torch.device], Scorer] = {}

    # -- loading and saving ---------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        torch_dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        dtype: torch.dtype | dict[str, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a packaged model by name (without network access), a local folder, or a Hub model (`"owner/name"`).

        Args:
            torch_dtype, dtype: dtype of the transformer and of a large text encoder, or a dict of dtypes by component; the
                two are the old and the new name in diffusers. Default: bfloat16 on machines with CUDA and on CPUs with
                hardware bfloat16 multiplication, else float32. The image tokenizer stays in float32, as trained.
            **kwargs: passed to `DiffusionPipeline.from_pretrained`.

        Raises:
            ValueError: before any weight is loaded, if both dtypes are given, a dtype is not floating-point, the name is
                unknown, the folder has no `model_index.json`, contains code or requests it from elsewhere, or a component is
                missing, damaged or does not match the others. Also for `trust_remote_code` and `custom_pipeline`.
            TypeError: for an unknown argument.
            MemoryError: if the weights do not fit in memory; the message reports their size in bytes.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        model = check_model_folder(pretrained_model_name_or_path, cls.family, kwargs)
        folder = model.path
        with loading_memory(folder):
            kwargs[_DTYPE] = resolve_dtypes(model, torch_dtype if dtype is None else dtype)
        kwargs.setdefault("use_safetensors", True)
        if "prompt_names" not in kwargs:
            kwargs["prompt_names"] = PromptNames.read(shared_component_folders(folder).get("prompt_names", folder))
        with loading_memory(folder), no_bar(folder):
            examples = load_example_tokens(folder)
            kwargs |= load_shared_components(folder, kwargs)
            pipe = super().from_pretrained(str(folder), **{**placing(), **kwargs})
        if examples is not None and pipe.transformer is not None:
            network: Any = pipe
            check_example_tokens(examples, network.vocab, network.tokens)
        pipe.examples = examples
        return pipe

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As in diffusers, with former module paths of components replaced by the current ones."""
        loaded: Any = super().load_config(*args, **kwargs)
        config, *others = loaded if isinstance(loaded, tuple) else (loaded,)
        config = current_modules(config, cls.family)
        return (config, *others) if isinstance(loaded, tuple) else config

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """As in diffusers. Also copies `prompt_names` and `examples`, which are not part of the config."""
        kwargs.setdefault("prompt_names", getattr(pipeline, "prompt_names", None))
        pipe = super().from_pipe(pipeline, **kwargs)
        pipe.examples = getattr(pipeline, "examples", None)
        return pipe

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` can load. Files are written atomically, and none is written if saving fails.

        Args:
            save_directory: created if missing. Other files in it are kept, except shards of earlier weights.
            **kwargs: passed to `DiffusionPipeline.save_pretrained`.

        Raises:
            OSError: if the folder cannot be created or written.
        """
        folder = expand_user(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_merge(folder) as staged:
            super().save_pretrained(str(staged), **kwargs)
            if self.prompt_names is not None:
                self.prompt_names.write(staged)
            if self.examples is not None:
                save_example_tokens(self.examples, staged)
        if self.examples is None:
            (folder / EXAMPLES_FILE).unlink(missing_ok=True)  # left by a model saved here earlier
        (folder / SHARED_FILE).unlink(missing_ok=True)  # likewise
        if self.prompt_names is None:
            (folder / NAMES_FILE).unlink(missing_ok=True)

    # -- supported methods ----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def described(cls, folder: Path, index: Mapping[str, Any]) -> ModelInfo:
        """Summarize a validated folder of this family. `index` is the content of its `model_index.json`."""

    @classmethod
    @abstractmethod
    def check_method(cls, described: ModelInfo, method: Any) -> None:
        """Raise ValueError if the model of a folder cannot run a method; `check_runs` has the checks that need weights."""

    @abstractmethod
    def check_runs(self, method: Any) -> None:
        """Raise ValueError with the reason if this pipeline cannot run a method."""

    def methods(self) -> list[Method]:
        """List the presets of this paradigm, each with its name, kind, and the reason if this pipeline cannot run it."""
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
        """Return the method for a preset name, or the given method itself, if it belongs to this paradigm.

        Raises:
            ValueError, TypeError: for anything else.
        """
        return resolve_method(accelerator, self.paradigm)

    def named_scorer(self, name: str) -> Scorer:
        """Return the scorer with this name, loaded on first use; see `vargen.scoring.open_scorer`."""
        key = (name, self._execution_device)
        if key not in self._scorers:
            self._scorers[key] = open_scorer(*key)
        return self._scorers[key]

    def _device_of(self, component: Any) -> torch.device:
        """Device on which a component runs. While diffusers offloads it, its weights are on another one."""
        offloaded = component.device.type == "meta" or hasattr(component, "_hf_hook")
        return self._execution_device if offloaded else component.device
