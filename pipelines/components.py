"""The model families: which pipeline opens which folder, and of which classes its networks are."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var import VARTransformer

Class = tuple[str, str]  # library, or module of ours, and class name: what an index names


# Modules of components as vargen 0.1 wrote them into `model_index.json`, and where their classes are now.
MOVED_MODULES = {
    "vargen.models.vq": "vargen.models.tokenizers.vq",
    "vargen.models.multi_scale_vq": "vargen.models.tokenizers.multi_scale_vq",
    "vargen.models.video_vae": "vargen.models.tokenizers.video_vae",
    "vargen.models.wan_vae": "vargen.models.tokenizers.wan_vae",
    "vargen.models.video_preview": "vargen.models.tokenizers.preview_decoder",
    "vargen.models.eagle": "vargen.models.heads.eagle",
    "vargen.models.medusa": "vargen.models.heads.medusa",
    "vargen.models.upsampler": "vargen.models.heads.upsampler",
}


def current_modules(index: Mapping[str, Any]) -> dict[str, Any]:
    """A `model_index.json` with today's modules: folders that vargen 0.1 wrote name some by an earlier path."""
    return {
        name: [MOVED_MODULES.get(value[0], value[0]), *value[1:]]
        if isinstance(value, list) and value and isinstance(value[0], str)
        else value
        for name, value in index.items()
    }


@dataclass(frozen=True)
class Family:
    """Pipelines of one kind.

    Attributes:
        pipeline: class name, as `model_index.json` has it. module: where that class is.
        networks: by component, the class of ours that it must be.
        convert: the command that makes such a folder from official files.
        networks_module: what opens its networks to be measured; None where nothing does.
        shared: by kind of condition, what a second transformer's configuration must share with the first one's.
        drafters: components that are drafters trained on the transformer's features.
        required: components that an index must name.
        check: the module whose `check_parts(configs, defaults)` says whether its parts belong together; None for families of
            pictures, which `vargen.pipelines.parts` knows.
    """

    pipeline: str
    module: str
    networks: dict[str, type]
    convert: str
    shared: dict[str, tuple[str, ...]]
    networks_module: str | None = None
    drafters: tuple[str, ...] = ()
    required: tuple[str, ...] = ("transformer", "vqvae")
    check: str | None = None

    def classes(self) -> dict[str, list[Class]]:
        """What an index may name, by component."""
        return {**{part: [of(kind)] for part, kind in self.networks.items()}, **TEXT_CLASSES}


def of(kind: type) -> Class:
    return kind.__module__, kind.__name__


# Libraries and classes that an index may name for the text side. A list, not a rule about libraries: diffusers imports what an
# index names, up to 0.37 also from a file of that name in the component's folder, and `DiffusionPipeline` is a class of
# diffusers. The last two tokenizers are what transformers 4 and 5 call one that is read from tokenizer.json alone.
TEXT_CLASSES: dict[str, list[Class]] = {
    "text_encoder": [of(MiniLMTextEncoder), ("transformers", "T5EncoderModel")],
    "tokenizer": [
        ("transformers", name)
        for name in (
            "BertTokenizer", "BertTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast",
            "TokenizersBackend",
        )
    ],
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    family.pipeline: family
    for family in (
        Family(
            pipeline="LlamaGenPipeline",
            module="vargen.pipelines.llamagen",
            networks={
                "transformer": LlamaGenTransformer,
                "draft_transformer": LlamaGenTransformer,
                "vqvae": VQModel,
                "eagle": EagleDrafter,
                "medusa": MedusaDrafter,
                "low_res": LlamaGenTransformer,
                "upsampler": TokenUpsampler,
            },
            convert="vargen convert llamagen --transformer FILE --vq FILE --output DIR",
            shared={
                "class": ("condition", "num_classes", "vocab_size", "grid_size"),
                "text": ("condition", "cls_token_num", "caption_dim", "vocab_size", "grid_size"),
            },
            networks_module="vargen.pipelines.llamagen_network",
            drafters=("eagle", "medusa"),
        ),
        Family(
            pipeline="VARPipeline",
            module="vargen.pipelines.var",
            networks={"transformer": VARTransformer, "draft_transformer": VARTransformer, "vqvae": MultiScaleVQModel},
            convert="vargen convert var --transformer FILE --vae FILE --output DIR",
            shared={
                "class": ("condition", "num_classes", "vocab_size", "code_dim", "scales"),
                "text": ("condition", "caption_rows", "caption_dim", "vocab_size", "code_dim", "scales"),
            },
            networks_module="vargen.pipelines.var_network",
        ),
        Family(
            pipeline="CausalVideoPipeline",
            module="vargen.pipelines.causal_video",
            networks={
                "transformer": CausalVideoTransformer,
                "draft_transformer": CausalVideoTransformer,
                "vae": CausalVideoVAE,
                "preview_decoder": PreviewDecoder,
            },
            convert="python -m recipes package emoji-video",
            shared={},
            required=("transformer", "vae"),
            check="vargen.pipelines.video_parts",
        ),
    )
}


# What any family's index may name, by component.
CLASSES: dict[str, list[Class]] = {}
for _family in FAMILIES.values():
    for _component, _classes in _family.classes().items():
        CLASSES[_component] = list(dict.fromkeys([*CLASSES.get(_component, []), *_classes]))

_CODE = (".py", ".pyc", ".pyd", ".so")
_ABSENT = [None, None]  # how diffusers writes that a part is not there
_MOST_FILES = 10_000  # of a component
# Keys by which a configuration has its reader run or fetch code: transformers' and diffusers' remote classes, and kernels
# of the hub, which transformers names in place of an attention or expert implementation.
_CODE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})
_KERNEL_KEYS = ("implementation", "implementation_internal")


# What diffusers' `from_pretrained` takes beside components: any other name it ignores.
_OPTIONS = frozenset(
    "torch_dtype dtype cache_dir force_download proxies local_files_only token revision variant use_safetensors device_map "
    "max_memory offload_folder offload_state_dict low_cpu_mem_usage disable_mmap quantization_config output_loading_info "
    "mirror trust_remote_code custom_pipeline custom_revision load_connected_pipeline use_onnx use_flashpack from_flax "
    "dduf_file provider sess_options provider_options".split()
)
_VALUES = ("id2label", "defaults", "prompt_styles", "prompt_names")  # that pipelines keep beside their components


def check_options(options: Mapping[str, Any], components: Collection[str] = CLASSES) -> None:
    """Raise ValueError for options of `from_pretrained` that ask for code from elsewhere, TypeError for unknown ones.

    Args:
        components: of the pipeline; those of all families where it is not known yet.
    """
    for name in options:
        if name not in _OPTIONS and name not in _VALUES and name not in components:
            near = get_close_matches(name, [*_OPTIONS, *_VALUES, *components], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint = "call .to(device) on the pipeline, or use open_pipeline(name, device=...); " if name == "device" else hint
            raise TypeError(
                f"{name} is no argument for opening a pipeline: {hint}it takes options of DiffusionPipeline.from_pretrained "
                f"and the components {', '.join(components)}"
            )
    for name in ("trust_remote_code", "custom_pipeline"):
        if options.get(name):
            raise ValueError(f"{name} must be left out, got {options[name]!r}: vargen runs no code that comes with a model")


def check_classes(index: Mapping[str, Any], index_file: Path, given: Container[str] = ()) -> None:
    """Raise ValueError unless every component that an index names is of a class that it may be in its family.

    Args:
        given: components that a caller brings.
    """
    family = FAMILIES[index["_class_name"]]
    classes = family.classes()
    for component in family.required:
        if component not in index or (index[component] in (None, _ABSENT) and component not in given):
            again = f"download or convert the folder again, or give {component} as you open it"
            raise ValueError(f"{index_file} names no {component!r}; {again}")
    for component, value in index.items():
        if component in classes:
            allowed = classes[component]
            if value == _ABSENT or (isinstance(value, list) and tuple(value) in allowed):
                continue
            if value is None:
                raise ValueError(f"{index_file} has {component!r}: null; where a part is not there it must be [null, null]")
            choice = ", ".join(f"{library}.{name}" for library, name in allowed)
            raise ValueError(f"{index_file} takes {component!r} from {_said(value)}; only {choice} may be named there")
        named = isinstance(value, list) and value != _ABSENT
        if named and component not in ("id2label", "defaults", "prompt_styles"):
            raise ValueError(f"{index_file} names {component!r}, from {_said(value)}; only {', '.join(classes)} are components")


def check_no_code(folder: Path) -> None:
    """Raise ValueError if the folder, or a component's folder in it, holds a file that Python could import."""
    top = [entry for entry in sorted(folder.iterdir()) if entry.is_file()]
    inside = [file for component in CLASSES for file in _files(folder / component)]
    for file in top + inside:
        if file.suffix.lower() in _CODE:
            raise ValueError(
                f"{file} is program code, and vargen runs none that comes with a model; if it is a file of your own, "
                "keep it outside the model folder"
            )


def _files(folder: Path) -> list[Path]:
    """Every file below a folder, also in folders that are linked, each of which is looked into once.

    Raises:
        ValueError: if there are more than `_MOST_FILES`: a link may lead to a whole disk.
    """
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if os.path.realpath(os.path.join(place, name)) not in seen)
        seen.update(os.path.realpath(os.path.join(place, name)) for name in folders)
        found += [Path(place) / name for name in sorted(names)]
        if len(found) + len(seen) > _MOST_FILES:
            raise ValueError(f"{folder} holds more than {_MOST_FILES} files and folders, links followed; it is no component's")
    return found


def check_no_code_keys(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError if a configuration names code to run or to fetch."""
    for key, value in config.items():
        kernel = key.endswith(_KERNEL_KEYS) and isinstance(value, str | dict) and "/" in str(value)
        if kernel or (key in _CODE_KEYS and value):
            raise ValueError(f"{file} has {key!r}: {value!r}, which asks for code from elsewhere; vargen runs none")


def _said(value: Any) -> str:
    """A component's entry as it is best read: the library where that alone is foreign."""
    return f"{value[0]!r} ({value[1]!r})" if isinstance(value, list) and len(value) == 2 else repr(value)
