"""The model families: which pipeline opens which folder, and of which classes its networks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
