"""Pipeline around an image language model of transformers. B images, N tokens of the grid."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.compat import report_panics, without_autocast
from vargen.convert.vqgan import OfficialVQGAN
from vargen.device import select_device
from vargen.files import atomic_merge, expand_user
from vargen.folders.json_files import read_config
from vargen.folders.networks import NetworkFolder
from vargen.folders.processors import load_processor
from vargen.folders.tokenizers import load_tokenizer
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.guidance import Guidance, to_guidance
from vargen.models.storage import find_device, load_network, require_weights
from vargen.models.tokenizers.vqgan import StoredVQGAN
from vargen.models.transformers.base import ImageLanguageModel, validate_network
from vargen.models.transformers.causal import NETWORKS, OTHER_NAMES, CausalLanguageModel
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.emu3_5 import OFFICIAL
from vargen.models.transformers.int8 import MOST_POSITIONS, Int8Network, quantize_layers, validate_int8, validate_layers
from vargen.models.transformers.int8_decoding import Int8Parts, Int8TokenModel
from vargen.models.transformers.supported import MODELS, describe_language_model, validate_release
from vargen.pipelines import loading, validation
from vargen.pipelines.families import Component, ModelFamily
from vargen.pipelines.generation import NextTokenPipeline
from vargen.pipelines.images import decode_pixels
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.model_names import FETCHING, locate_folder
from vargen.values import one_line

logger = logging.getLogger("vargen")


class LanguageModelPipeline(NextTokenPipeline):
    """Text to image with an image language model of transformers, by any next-token method.

    Args:
        model: see `vargen.models.transformers.supported`; in evaluation mode. Its weights stay where they are.
        processor: the model's processor; of a class that text models have, too, its tokenizer.
        draft_model: a smaller model of the same class with the same image tokens, for `accelerator="speculative"`.
        size: rows and columns of the image in tokens, for models that have more than one size. None: the published one.
        negative_format: see `Emu3`, the only model that has one.
        quantization: `"int8"` runs the layers and the image head on a CPU with 8-bit integer products; see
            `vargen.models.transformers.int8`.
        vision_tokenizer: a `VQGANDecoder` that makes images of the tokens of Chameleon, Liquid or Emu3.5.

    Unknown classes, a processor of another model, and models or draft models that do not fit are refused.
    """

    pixel_decoder: ClassVar[str] = "transformer"

    def __init__(
        self, model: Any, processor: Any, draft_model: Any = None,
        size: tuple[int, int] | None = None, negative_format: str | None = None, quantization: str | None = None,
        vision_tokenizer: Any = None,
    ):  # fmt: skip
        self._describe = partial(
            describe_language_model,
            processor=processor,
            size=size,
            negative_format=negative_format,
            vision_tokenizer=vision_tokenizer,
        )
        described = self._describe(model)
        described.validate_processor(processor)
        if draft_model is not None:
            described.validate_draft(self._describe(draft_model))
        self._init_calls()
        self.model, self.processor, self.draft_model = model, processor, draft_model
        self.vision_tokenizer = vision_tokenizer
        self._descriptions: dict[str, tuple[Any, ImageLanguageModel]] = {}
        self.quantization = validate_int8(quantization, described.device)
        self._int8_parts: dict[str, tuple[ImageLanguageModel, Int8Parts]] = {}
        for each in (model, draft_model):
            if quantization is not None and each is not None and not hasattr(each, "int8_network"):
                each.int8_network = quantize_layers(self._describe(each))
        self.draft_heads: dict[str, Any] = {}
        self.register_to_config(defaults=None, id2label=None, prompt_styles=None)
        self.decoding_model()  # refuses networks that do not fit

    @classmethod
    @without_autocast
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        draft_model: str | Path | None = None,
        *,
        torch_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        size: tuple[int, int] | None = None,
        negative_format: str | None = None,
        quantization: str | None = None,
        vision_tokenizer: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Open a folder of transformers, with safetensors only and without running code of the folder.

        Args:
            pretrained_model_name_or_path: a folder with `config.json`, or a hub id `"owner/name"`.
            draft_model: the same, for a smaller model with the same image tokens.
            torch_dtype, dtype: of both models. Default: the fastest of the device; float32 for small models on a CPU.
            device: where the models run; `"auto"` selects a GPU if there is one. Default: the CPU.
            size, negative_format: as of the class.
            quantization: as of the class; layers are quantized one after the other while they are read.
            vision_tokenizer: image tokenizer of Chameleon, Liquid or Emu3.5: a folder, an id, or a file such as `vqgan.ckpt`.
                Default: the model's subfolder of this name, if any.
            **options: of transformers, for the model: `device_map`, `max_memory`, `offload_folder`, `quantization_config`,
                `attn_implementation`; `cache_dir`, `force_download`, `local_files_only`, `token` and `revision` of the hub.

        A folder that asks for code, lacks a part or does not fit is refused before any weight is read.
        """
        if unknown := [key for key in options if key not in (*FETCHING, *loading.LANGUAGE_MODEL_OPTIONS)]:
            allowed = ", ".join(("dtype", "device", *loading.LANGUAGE_MODEL_OPTIONS, *FETCHING))
            raise TypeError(f"{unknown[0]} is no argument for opening an image language model; allowed are {allowed}")
        if dtype is not None and torch_dtype is not None:
            raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
        if device is not None and options.get("device_map") is not None:
            raise ValueError(f"give device or device_map, not both; got {device!r} and {options['device_map']!r}")
        place = torch.device("cpu") if device is None else select_device(device)
        validate_int8(quantization, place)
        fetching = {key: options.pop(key) for key in FETCHING if key in options}
        names = [each for each in (pretrained_model_name_or_path, draft_model) if each is not None]
        folders = [locate_folder(each, fetching) for each in names]
        stored, described = zip(*(_read_folder(folder, size, negative_format) for folder in folders), strict=True)
        processor = load_processor(folders[0], described[0])
        described[0].validate_processor(processor)
        vision = _read_vision_tokenizer(described[0], folders[0], vision_tokenizer, fetching)
        shape: dict[str, Any] = {"size": size, "negative_format": negative_format}
        if vision is not None:  # refused if it is that of another model
            describe_language_model(stored[0].network, processor, **shape, vision_tokenizer=vision.network)
        for each in described[1:]:
            described[0].validate_draft(each)
        if quantization is not None:
            others = [name for name in ("device_map", "quantization_config") if options.get(name) is not None]
            if others or any(each.is_quantized for each in stored):
                where = f"beside {others[0]}" if others else "for stored weights that are quantized"
                raise ValueError(f"quantization must be None {where}, got {quantization!r}")
            for each in described:
                validate_layers(each.body)
        kind = torch_dtype or dtype or loading.default_dtype(folders[0], place)
        models = []
        for each, known, given in zip(stored, described, (options, {}), strict=False):
            if quantization is not None:
                models.append(_load_int8(each, known, kind, given))
                continue
            moves = given.get("device_map") is None  # else options of transformers place it
            if moves and (each.is_quantized or given.get("quantization_config") is not None):  # cannot be moved later
                given, moves = {**given, "device_map": {"": place}}, False
            model = each.load(kind, **given)
            models.append(model.to(place).eval() if moves else model.eval())
        pixels = None if vision is None else vision.load().to(find_device(models[0].get_input_embeddings()))
        draft = models[1] if models[1:] else None
        pipe = cls(models[0], processor, draft, **shape, quantization=quantization, vision_tokenizer=pixels)
        pipe.folder = folders[0]
        if heads := list_heads(folders[0]):
            pipe.load_drafter(*(folders[0] / name for name in heads))
        return pipe

    @classmethod
    def inspect(cls, folder: Path) -> Self:
        stored, described = _read_folder(folder)
        vision = _read_vision_tokenizer(described, folder, None, {})
        pipe = cls(stored.network, load_processor(folder, described), vision_tokenizer=vision and vision.network)
        pipe.folder = folder
        if names := list_heads(folder):
            heads = _read_heads(pipe.decoding_model(), *(folder / name for name in names))
            pipe.draft_heads = {name: stored.network for name, stored in heads.items()}
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: Any, **changed: Any) -> Self:
        """Return a pipeline that shares the parts of another, but for `changed` arguments."""
        options = {**pipeline._describe.keywords, "quantization": pipeline.quantization} if isinstance(pipeline, cls) else {}
        pipe = super().from_pipe(pipeline, **{**options, **changed})
        if "model" not in changed:
            pipe.folder, pipe.draft_heads = pipeline.folder, dict(pipeline.draft_heads)
        return pipe

    # What the base class asks for, and where it is.
    transformer: Any = property(attrgetter("model"))
    makes_images: Any = property(attrgetter("language_model.has_pixels"))
    vocab_size: Any = property(attrgetter("language_model.vocab"))
    max_caption_tokens: Any = property(attrgetter("language_model.max_prompt_tokens"))
    codebook: Any = property(attrgetter("language_model.codebook"))
    default_sampling: Any = property(attrgetter("language_model.default_sampling"))
    is_class_conditional, class_names, reads_prompts = False, {}, True

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return (self.language_model.grid,)

    @property
    def language_model(self) -> ImageLanguageModel:
        """The description of the model; a new one after its weights were moved, cast or changed."""
        return self._description("model")

    def _description(self, name: str) -> ImageLanguageModel:
        model = getattr(self, name)
        weight = model.get_output_embeddings().weight
        version = None if weight.is_inference() else weight._version  # tensors of inference mode have none
        key = (weight.device, weight.dtype, weight.data_ptr(), version)
        if name not in self._descriptions or self._descriptions[name][0] != key:
            found = self._describe(model)
            found.most_positions = None if self.quantization is None else MOST_POSITIONS
            self._descriptions[name] = key, found
        return self._descriptions[name][1]

    def _device_of(self, component: Any) -> torch.device:
        return self.language_model.device

    def encode_condition(
        self, prompt: Any = None, *, negative_prompt: Any = None, clean_prompt: bool = False, **others: Any
    ) -> tuple[Any, int]:
        """Return the `PromptRows` of prompts and negative prompts, and the number of prompts."""
        others |= {"clean_prompt": clean_prompt or None}
        if given := [name for name, value in others.items() if value is not None]:
            raise TypeError(f"{given[0]} must be left out: this model reads prompts")
        prompts, blank = validation.validate_prompts(prompt), None
        if not validation.is_blank(negative_prompt):
            negative = validation.validate_prompts(negative_prompt, "negative_prompt")
            if len(negative) not in (1, len(prompts)):
                raise ValueError(f"negative_prompt must be one, or one per prompt, got {len(negative)} for {len(prompts)}")
            blank = negative * (len(prompts) // len(negative))
        with report_panics("prompt cannot be read by this model's tokenizer, which is damaged"):
            found = self.language_model.encode_prompts(self.processor, prompts, blank)
        self.language_model.validate_lengths(found)
        return found, len(prompts)

    def decoding_model(self, guidance: Guidance | float = 1.0) -> TransformersTokenModel:
        """Return the adapter of the model and its drafters for `vargen.decoding.decode`."""
        guidance = to_guidance(guidance)
        draft = None if self.draft_model is None else self._token_model("draft_model", guidance)
        heads = bind_heads(self.draft_heads, self.language_model.device)
        return self._token_model("model", guidance, draft, draft_heads=heads)

    def _token_model(self, name: str, *args: Any, **options: Any) -> TransformersTokenModel:
        described = self._description(name)
        if self.quantization is None:
            return TransformersTokenModel(described, *args, **options)
        validate_int8(self.quantization, described.device)
        if name not in self._int8_parts or self._int8_parts[name][0] is not described:
            self._int8_parts[name] = described, Int8Parts(described, getattr(self, name).int8_network)
        return Int8TokenModel(described, self._int8_parts[name][1], *args, **options)

    def _load_drafters(self, *drafters: Any) -> dict[str, Any]:
        heads = open_heads(self.decoding_model(), *drafters)
        self.draft_heads.update(heads)
        return heads

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write a folder of transformers, with each draft head, and an image tokenizer, in a subfolder of its name.

        `open_pipeline` opens it with these. A draft model is not saved.

        Args:
            kwargs: passed to `save_pretrained` of the model.
        """
        if hasattr(self.model, "int8_network"):
            raise ValueError("a model with quantization='int8' cannot be saved: its layers have no floating-point weights")
        if not hasattr(self.model, "hf_device_map"):  # with which transformers finds offloaded weights itself
            require_weights(self.model, "saved", "model")
        folder = expand_user(save_directory, "save_directory")
        with atomic_merge(folder) as staged:
            self.model.save_pretrained(str(staged), safe_serialization=True, **kwargs)
            self.processor.save_pretrained(str(staged))
            if self.vision_tokenizer is not None:
                self.vision_tokenizer.save(staged / _VISION)
            for name, network in self.draft_heads.items():
                network.save_pretrained(str(staged / name), safe_serialization=True)
        (folder / "model_index.json").unlink(missing_ok=True)  # of another family that was saved there

    def decode_grids(self, tokens: Tensor) -> Tensor:
        return decode_pixels(self.language_model.decode_pixels, tokens.flatten(1).to(self.language_model.device))

    def mask_generated(self, length: Tensor, size: tuple[int, int]) -> Tensor:
        return self.language_model.mask_generated(length, size)


_VISION = "vision_tokenizer"
_PARTS = dict.fromkeys(("model", "processor", "draft_model", _VISION), Component((), follows_dtype=True))
LanguageModelPipeline.family = ModelFamily("language-model", LanguageModelPipeline, _PARTS)


def _read_folder(
    folder: Path, size: tuple[int, int] | None = None, negative_format: str | None = None
) -> tuple[StoredNetwork, ImageLanguageModel]:
    """Check a folder of transformers and describe its model, whose weights are not read and take no memory."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} holds no config.json, so it is not a model of transformers")
    names = read_config(file).get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    found = OTHER_NAMES.get(named, named or None)
    if found not in MODELS and found not in NETWORKS:
        raise ValueError(f"{file} describes a {found!r}; vargen runs {', '.join((*MODELS, *NETWORKS))}")
    kind = MODELS.get(found, CausalLanguageModel)
    validate_release(kind)
    tokenizer = load_tokenizer(folder, kind.processor_name) if issubclass(kind, CausalLanguageModel) else None
    stored = StoredNetwork(folder, OFFICIAL.get(named) or NETWORKS.get(found) or kind.stored)
    try:
        described = describe_language_model(stored.network, tokenizer, size=size, negative_format=negative_format)
        validate_network(described)
        _ = described.max_prompt_tokens  # the image fits the context
    except (ValueError, TypeError):
        raise
    except Exception as error:  # from a value that its class does not validate
        raise ValueError(f"{file} does not describe a {found}: {one_line(error)}") from error
    return stored, described


def _read_vision_tokenizer(
    described: ImageLanguageModel, folder: Path, given: str | Path | None, fetching: dict[str, Any]
) -> StoredVQGAN | OfficialVQGAN | None:
    """Check the given image tokenizer, or else that in a model's folder, if the model takes one."""
    if given is None:
        own = folder / _VISION
        return StoredVQGAN(own) if _VISION in described.options and own.is_dir() else None
    file = expand_user(given, _VISION)
    return OfficialVQGAN(file) if file.is_file() else StoredVQGAN(locate_folder(given, fetching))


def _load_int8(stored: StoredNetwork, described: ImageLanguageModel, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Load a network whose layers are quantized while they are read, one after the other."""
    layers = next(name for name, module in stored.network.named_modules() if module is described.body) + ".layers"
    model = stored.load(dtype, without=layers, **options)
    body = describe_language_model(model).body
    model.int8_network = Int8Network(body, partial(stored.read_layer, layers), len(described.body.layers))
    return model


def list_heads(folder: Path) -> list[str]:
    """Return the names of the draft heads that `LanguageModelPipeline.save_pretrained` stored in a folder."""
    return [name for name in LlamaGenPipeline.family.drafters if (folder / name / "config.json").is_file()]


def open_heads(target: TransformersTokenModel, *folders: Any) -> dict[str, Any]:
    """Return the draft heads in folders of training runs or of saved networks, by component name, if they fit the target."""
    return {name: load_network(stored, target.dtype) for name, stored in _read_heads(target, *folders).items()}


def bind_heads(networks: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what makes the draft heads of a `TransformersTokenModel` from networks by component name, moved to a device."""
    known = LlamaGenPipeline.family.drafters
    return {name: partial(known[name].adapter, each.to(device)) for name, each in networks.items()}


def _read_heads(target: TransformersTokenModel, *names: Any) -> dict[str, NetworkFolder]:
    """Return the draft heads in folders of training runs or of saved networks, by component name."""
    if not target.has_features:
        raise ValueError("drafter must wait until the model is loaded without offloading, whose hooks hide its features")
    known, family = target.description, LlamaGenPipeline.family
    found = dict(loading.resolve_drafter(each, family) for each in names)
    for name, stored in found.items():
        if name not in family.drafters:
            raise ValueError(f"{stored.folder} holds a {name}, which drafts for LlamaGen only, not for {known.class_name}")
        for setting, own in known.head_settings.items():
            if own is not None and (value := stored.config.get(setting, own)) != own:
                raise ValueError(f"{stored.folder} was trained for another model: {setting} is {value}, not {own}")
    return found
