"""Registry of the model families, and the checks of a folder's index: which classes it may name, and that it has no code."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.llamagen import SIZES, LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var import SCALES, VARTransformer, official_config

Class = tuple[str, str]  # library (or vargen module) and class name, as in model_index.json


# Module paths that vargen 0.1 wrote into `model_index.json`, and the current ones.
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
    """Return a `model_index.json` with current module paths; folders written by vargen 0.1 have former ones."""
    return {
        name: [MOVED_MODULES.get(value[0], value[0]), *value[1:]]
        if isinstance(value, list) and value and isinstance(value[0], str)
        else value
        for name, value in index.items()
    }


@dataclass(frozen=True)
class Family:
    """Registration of a model family.

    Attributes:
        pipeline: class name of the pipeline in `model_index.json`.
        module: module of that class.
        networks: required vargen class of each component.
        convert: command that converts official checkpoints to such a folder.
        official_sizes: configurations by component of the released sizes, by name; benchmarks run them with random weights.
        shared: by kind of condition, the configuration keys in which a draft transformer must agree with the transformer.
        drafters: components that are drafters trained on the transformer's features.
        required: components that an index must name.
        check: module whose `check_parts(configs, defaults)` checks that the components match; None for image families, which
            `vargen.pipelines.parts` checks.
    """

    pipeline: str
    module: str
    networks: dict[str, type]
    convert: str
    shared: dict[str, tuple[str, ...]]
    official_sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    drafters: tuple[str, ...] = ()
    required: tuple[str, ...] = ("transformer", "vqvae")
    check: str | None = None

    def classes(self) -> dict[str, list[Class]]:
        """Return the classes that an index may name, by component."""
        return {**{part: [of(kind)] for part, kind in self.networks.items()}, **TEXT_CLASSES}


def of(kind: type) -> Class:
    return kind.__module__, kind.__name__


# Libraries and classes that an index may name for the text encoder and tokenizer. Classes are listed one by one, because
# allowing a whole library is not safe: diffusers imports whatever an index names (up to 0.37 also from a file of that name in
# the component's folder), and `DiffusionPipeline` is itself a class of diffusers. The last two tokenizers are the class names
# in transformers 4 and 5 of a tokenizer that has only a tokenizer.json.
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
            official_sizes={f"llamagen-{name.lower()}": {"transformer": size} for name, size in SIZES.items()},
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
            official_sizes={
                f"var-d{depth}": {"transformer": official_config(depth, pixels), "vqvae": {"scales": SCALES[pixels]}}
                for depth, pixels in ((16, 256), (20, 256), (24, 256), (30, 256), (36, 512))
            },
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


# Classes that an index of any family may name, by component.
CLASSES: dict[str, list[Class]] = {}
for _family in FAMILIES.values():
    for _component, _classes in _family.classes().items():
        CLASSES[_component] = list(dict.fromkeys([*CLASSES.get(_component, []), *_classes]))

_CODE = (".py", ".pyc", ".pyd", ".so")
_ABSENT = [None, None]  # how diffusers marks a missing component
_MOST_FILES = 10_000  # per component
# Configuration keys that make the library fetch or run code: remote classes of transformers and diffusers, and kernels from
# the Hub, which transformers accepts as the name of an attention or expert implementation.
_CODE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})
_KERNEL_KEYS = ("implementation", "implementation_internal")


# Arguments of diffusers' `from_pretrained` other than components. It ignores unknown ones silently.
_OPTIONS = frozenset(
    "torch_dtype dtype cache_dir force_download proxies local_files_only token revision variant use_safetensors device_map "
    "max_memory offload_folder offload_state_dict low_cpu_mem_usage disable_mmap quantization_config output_loading_info "
    "mirror trust_remote_code custom_pipeline custom_revision load_connected_pipeline use_onnx use_flashpack from_flax "
    "dduf_file provider sess_options provider_options".split()
)
_VALUES = ("id2label", "defaults", "prompt_styles", "prompt_names")  # stored with a pipeline's components


def check_options(options: Mapping[str, Any], components: Collection[str] = CLASSES) -> None:
    """Raise ValueError for options of `from_pretrained` that request remote code, TypeError for unknown options.

    Args:
        components: components of the pipeline; by default those of all families, for when the pipeline is not known yet.
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
    """Raise ValueError unless an index has all required components and names only classes that its family allows.

    Args:
        given: components that the caller passes.
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
    """Raise ValueError if the folder or the folder of a component contains a file that Python could import."""
    top = [entry for entry in sorted(folder.iterdir()) if entry.is_file()]
    inside = [file for component in CLASSES for file in _files(folder / component)]
    for file in top + inside:
        if file.suffix.lower() in _CODE:
            raise ValueError(
                f"{file} is program code, and vargen runs none that comes with a model; if it is a file of your own, "
                "keep it outside the model folder"
            )


def _files(folder: Path) -> list[Path]:
    """Return all files below a folder. Links to folders are followed, but each folder is visited only once.

    Raises:
        ValueError: for more than `_MOST_FILES` files and folders, since a link may lead to a whole disk.
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
    """Raise ValueError if a configuration requests code to be fetched or run."""
    for key, value in config.items():
        kernel = key.endswith(_KERNEL_KEYS) and isinstance(value, str | dict) and "/" in str(value)
        if kernel or (key in _CODE_KEYS and value):
            raise ValueError(f"{file} has {key!r}: {value!r}, which asks for code from elsewhere; vargen runs none")


def _said(value: Any) -> str:
    """Format a component's entry for an error message."""
    return f"{value[0]!r} ({value[1]!r})" if isinstance(value, list) and len(value) == 2 else repr(value)
