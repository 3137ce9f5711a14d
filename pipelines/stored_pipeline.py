"""What a pipeline has to do with folders and devices: components, opening, saving, offloading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor

from vargen.compat import without_autocast
from vargen.device import select_device
from vargen.files import atomic_merge, expand_user
from vargen.folders.tokenizers import TokenizerFolder
from vargen.models.storage import find_device, is_offloaded, load_network, require_weights
from vargen.pipelines import loading
from vargen.pipelines.families import STORED_VALUES, ModelFamily
from vargen.pipelines.prompts import PROMPT_NAMES_FILE, PromptNames


class StoredPipeline(DiffusionPipeline):
    """A pipeline of diffusers whose folders are opened by `vargen.pipelines.loading`.

    Its components may be offloaded by diffusers, or one by one by accelerate.

    Attributes:
        family: registration of the family; `register_family` sets it.
        pixel_decoder: name of the component that decodes tokens or latents to pixels.
        prompt_names: names that replace characters in a prompt; None if prompts are used as typed.
        folder: the folder that it was opened from; None if its components come from elsewhere.
    """

    family: ClassVar[ModelFamily]
    pixel_decoder: ClassVar[str] = "vqvae"

    transformer: Any
    prompt_names: PromptNames | None = None
    folder: Any = None

    def __init__(self, *components: Any, prompt_names: Any = None, **named: Any):
        """Validate and register components, by name or in the order of the family, and stored values."""
        known = self.family.components
        given = {**dict(zip(known, components, strict=False)), **named}
        if unknown := {name for name, each in given.items() if each is not None} - {*known, *STORED_VALUES}:
            raise TypeError(f"{min(unknown)} is no component of a {type(self).__name__}: {', '.join(known)}")
        parts = {name: given.get(name) for name in known}
        values = {name: given[name] for name in STORED_VALUES if name in given}
        self.family.check({name: getattr(part, "config", None) for name, part in parts.items()}, **values)
        super().__init__()
        self.register_modules(**parts)
        self.register_to_config(**{**dict.fromkeys(STORED_VALUES), **values})
        self.prompt_names = PromptNames(prompt_names) if isinstance(prompt_names, dict) else prompt_names
        # A pipeline loaded without networks can still encode prompts.
        factor = getattr(getattr(self, self.pixel_decoder), "downsampling", 8)
        self.image_processor = VaeImageProcessor(vae_scale_factor=factor)
        self._init_calls()

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
            torch_dtype, dtype: dtype of the transformer and of a large text encoder, or a dict of dtypes by component; the old
                and the new name in diffusers. Default: bfloat16 with CUDA and on CPUs with hardware bfloat16 multiplication,
                else float32. The image tokenizer stays in float32, as trained.
            quantization: `"int8"` runs transformers on a CPU with 8-bit integer products, in a quarter of the memory. Images
                differ from those of float32 in detail, and are the same for each exact method and batch. Default: as stored.
            **kwargs: `variant` of the names of weight files; components or stored values, such as `defaults`, that replace
                those of the folder, None to leave one out; `cache_dir`, `force_download`, `local_files_only`, `token` and
                `revision`.

        Invalid arguments or folders raise ValueError or TypeError before any weight is loaded.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        model = loading.read_model_folder(pretrained_model_name_or_path, cls.family, kwargs)
        parts = loading.load_components(model, torch_dtype if dtype is None else dtype, quantization, kwargs)
        pipe = cls._from_folder(model, parts)
        if any(kwargs.get(name) is not None for name in cls.family.components):
            pipe.folder = None  # which does not describe it
        return pipe

    @classmethod
    def inspect(cls, folder: Path) -> Self:
        """Return the pipeline of a folder without weights; see `vargen.pipelines.loading.inspect_model`."""
        model = loading.read_model_folder(folder, cls.family, {})
        parts = {
            part: each.load() if isinstance(each, TokenizerFolder) else each.network for part, each in model.stored.items()
        }
        return cls._from_folder(model, parts)

    @classmethod
    def _from_folder(cls, model: loading.ModelFolder, parts: Mapping[str, Any]) -> Self:
        pipe = cls(**parts, **model.values)
        pipe.register_to_config(_name_or_path=str(model.path))
        pipe.folder = model.path
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **changed: Any) -> Self:
        """Return a pipeline that shares components and stored values of another, but for `changed` ones."""
        if not isinstance(pipeline, cls):
            raise TypeError(f"pipeline must be a {cls.__name__}, got {type(pipeline).__name__}")
        pipe = cls(**{**pipeline.components, **changed})
        if not any(changed.get(name) is not None for name in cls.family.components):
            pipe.folder = pipeline.folder
        return pipe

    @property
    def components(self) -> dict[str, Any]:
        """The components and stored values by name: `type(pipe)(**pipe.components)` generates what `pipe` does."""
        values = {name: self.config.get(name) for name in STORED_VALUES} | {"prompt_names": self.prompt_names}
        found = {name: getattr(self, name) for name in self.family.components}
        return {**found, **{name: value for name, value in values.items() if value is not None}}

    @classmethod
    def _get_signature_keys(cls, obj: Any) -> tuple[set[str], set[str]]:
        """As in diffusers, which takes them from the constructor: the components, and the other arguments."""
        return set(cls.family.components), {*STORED_VALUES, "prompt_names"}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` can load. Files are whole, and none is written if saving fails.

        Args:
            save_directory: created if missing. Other files in it are kept, except those of a model saved there earlier.
            **kwargs: passed to `DiffusionPipeline.save_pretrained`.
        """
        self._require_weights("saved")
        folder = expand_user(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_merge(folder) as staged:
            super().save_pretrained(str(staged), **kwargs)
            if self.prompt_names is not None:
                self.prompt_names.save(staged)
        (folder / loading.SHARED_FILE).unlink(missing_ok=True)
        if self.prompt_names is None:
            (folder / PROMPT_NAMES_FILE).unlink(missing_ok=True)

    def load_drafter(self, drafter: Any, *others: Any) -> str:
        """Load a network that was trained for this model; it becomes a component, whose name is returned.

        What is no such network, or does not match the model, is refused before any weight is read.

        Args:
            drafter: folder of the training run or of the saved network, or the name of a packaged one, such as `"emoji/eagle"`.
            others: further ones, such as the up-sampler of a low-resolution transformer. All are loaded, or none.
        """
        return next(iter(self._load_drafters(drafter, *others)))

    def _load_drafters(self, *drafters: Any) -> dict[str, Any]:
        if self.transformer is None:
            raise ValueError("this pipeline was loaded without a transformer: there is nothing to draft for")
        family, dtype, device = self.family, self.transformer.dtype, self._device_of(self.transformer)
        found = dict(loading.resolve_drafter(each, family) for each in drafters)
        configs = {name: getattr(getattr(self, name), "config", None) for name in family.components}
        try:
            family.check(configs | {name: each.config for name, each in found.items()})
        except ValueError as error:
            raise ValueError(f"{', '.join(str(each.folder) for each in found.values())}: {error}") from error
        for each in found.values():
            codes = each.config.get("codes") and self.vqvae and self.vqvae.quantize.digest()
            if codes and codes != each.config["codes"]:
                raise ValueError(f"{each.folder} belongs to another codebook: digest {each.config['codes']}, not {codes}")
        networks = {
            name: load_network(each, dtype if family.components[name].follows_dtype else torch.float32).to(device)
            for name, each in found.items()
        }
        self.register_modules(**networks)
        return networks

    @property
    def has_weights(self) -> bool:
        """Whether it is no pipeline of `inspect_model`."""
        network = self.transformer
        return network is None or network.device.type != "meta" or is_offloaded(network)

    def _networks(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in self.components.items() if isinstance(part, torch.nn.Module)}

    def _device_of(self, component: Any) -> torch.device:
        """Device on which a component runs. While it is offloaded, its weights are on another one."""
        return find_device(component) if is_offloaded(component) else component.device

    @property
    def _execution_device(self) -> torch.device:
        """As in diffusers, which overlooks components that are offloaded one by one."""
        offloaded = next((part for part in self._networks().values() if is_offloaded(part)), None)
        return super()._execution_device if offloaded is None else find_device(offloaded)

    def _require_weights(self, action: str) -> None:
        """Raise ValueError naming a component whose weights are elsewhere."""
        for name, network in self._networks().items():
            require_weights(network, action, name)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As in diffusers; refused while weights are offloaded layer by layer, as hooks would undo it.

        Raises ValueError for a device that is not there; `"auto"` selects a GPU if there is one.
        """

        def select(value: Any) -> Any:
            return select_device(value) if isinstance(value, str | torch.device) else value

        self._require_weights("moved or cast")
        moved: Self = super().to(*map(select, args), **{name: select(value) for name, value in kwargs.items()})
        return moved
