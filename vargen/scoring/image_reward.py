"""ImageReward (Xu et al. 2023), a model of human preference for an image given its prompt, without the original 2023 package.

A BLIP vision transformer, a BERT with cross-attention to its features, and five linear layers on the first token. Both networks
use transformers' classes; the official file, whose names are mapped, is read as data only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from vargen.assets import packaged_model_path
from vargen.compat import ensure_torchvision, tokenized
from vargen.folders.tokenizers import load_tokenizer
from vargen.scoring.protocol import BatchedScorer, Images, require_local_file, to_pil
from vargen.weight_files import load_pickle_safely, validate_shapes, weights_digest

ensure_torchvision()

from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

SCORE_MEAN, SCORE_STD = 0.16717362830052426, 1.0333394966054072  # of the official training scores
CONTEXT = 35  # prompt tokens; longer prompts are truncated
SIDE = 224
_PIXEL_MEAN, _PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # as for CLIP
_HEAD = 64  # width of an attention head in both networks
_HIDDEN = (1024, 128, 64, 16, 1)
_HOW = "fetch ImageReward.pt of the hub model THUDM/ImageReward (1.8 GB) and give weights=FILE"
# Official parameter names to those of transformers. The text encoder's need no change.
_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.(\d+)\.", r"encoder.layers.\1."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.", ".self_attn."),
    (r"^norm\.", "post_layernorm."),
)


class ImageRewardNetwork(nn.Module):
    """Vision transformer, text encoder, and linear layers without activations between them, of the given sizes."""

    def __init__(self, vision: BlipVisionConfig, text: BlipTextConfig):
        super().__init__()
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        widths = (text.hidden_size, *_HIDDEN)
        self.mlp = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

    def forward(self, pixels_BCYX: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return scores float32 `[B]` for normalized pixels `[B, 3, 224, 224]` and tokens `[B, 35]`."""
        seen = self.vision(pixel_values=pixels_BCYX).last_hidden_state
        read = self.text(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            is_decoder=False,  # has cross-attention, but attention is not causal
        ).last_hidden_state
        return (self.mlp(read[:, 0].float())[:, 0] - SCORE_MEAN) / SCORE_STD


def build_from_state_dict(state: dict[str, Tensor], source: str = "weights") -> ImageRewardNetwork:
    """Build the network of an official state dict; sizes are inferred from the shapes."""
    vision, text, head = _split_state_dict(state)
    try:
        embedded, words = vision["embeddings.position_embedding"], text["embeddings.word_embeddings.weight"]
        patch = vision["embeddings.patch_embedding.weight"].shape[-1]
        vision_config = BlipVisionConfig(
            hidden_size=embedded.shape[-1],
            intermediate_size=vision["encoder.layers.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=_count_layers(vision, r"encoder\.layers\.(\d+)\."),
            num_attention_heads=embedded.shape[-1] // _HEAD,
            image_size=SIDE,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        text_config = BlipTextConfig(
            vocab_size=words.shape[0],
            hidden_size=words.shape[1],
            encoder_hidden_size=embedded.shape[-1],
            intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
            num_hidden_layers=_count_layers(text, r"encoder\.layer\.(\d+)\."),
            num_attention_heads=words.shape[1] // _HEAD,
            max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
            layer_norm_eps=1e-12,
            is_decoder=True,
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"{source} does not hold ImageReward: {error} is missing") from error
    own = {**_add_prefix("vision", vision), **_add_prefix("text", text), **_add_prefix("mlp", head)}
    with torch.device("meta"):
        network = ImageRewardNetwork(vision_config, text_config)
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    validate_shapes({name: tuple(value.shape) for name, value in own.items()}, expected, source)
    network = network.to_empty(device="cpu")
    network.load_state_dict({name: value.float() for name, value in own.items()})
    for module in network.modules():  # a buffer stored in no file, and uninitialized after `to_empty`
        if isinstance(ids := getattr(module, "position_ids", None), Tensor):
            module.position_ids = torch.arange(ids.numel())[None]
    return network.eval().requires_grad_(False)


def _split_state_dict(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    vision, text, head = {}, {}, {}
    for name, value in state.items():
        if name.startswith("blip.visual_encoder."):
            short = name.removeprefix("blip.visual_encoder.")
            for official, ours in _NAMES:
                short = re.sub(official, ours, short)
            vision[short] = value
        elif name.startswith("blip.text_encoder.") and not name.endswith("position_ids"):
            text[name.removeprefix("blip.text_encoder.")] = value
        elif name.startswith("mlp.layers."):
            head[name.removeprefix("mlp.layers.")] = value
    # The official indices count dropout layers, too: 0, 2, 4, 6, 7.
    places = {old: new for new, old in enumerate(sorted({int(name.split(".")[0]) for name in head}))}
    head = {f"{places[int(name.split('.')[0])]}.{name.split('.', 1)[1]}": value for name, value in head.items()}
    return vision, text, head


def _count_layers(state: dict[str, Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in state if (found := re.match(pattern, name)))


def _add_prefix(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": value for name, value in state.items()}


class ImageRewardScorer(BatchedScorer):
    """ImageReward with local weights.

    Args:
        weights: the official `ImageReward.pt`.
        tokenizer: a folder with the tokenizer of bert-base-uncased; by default that of the packaged text encoder, which has the
            same vocabulary.
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        tokenizer: str | Path | None = None,
        device: torch.device | str = "cpu",
        batch_size: int = 16,
    ):
        file = require_local_file(weights, "weights", "ImageReward", _HOW)
        folder = packaged_model_path("emoji") / "tokenizer" if tokenizer is None else Path(tokenizer)
        require_local_file(folder, "tokenizer", "ImageReward", "give a folder with bert-base-uncased's vocab.txt")
        self.tokenizer = load_tokenizer(folder, "BertTokenizerFast")
        self.network = build_from_state_dict(load_pickle_safely(file, if_damaged=_HOW), str(file)).to(device)
        self.identity = f"image-reward-{weights_digest(self.network)}"
        super().__init__("image-reward", True, device, batch_size)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        pixels = torch.stack([preprocess_image(image) for image in to_pil(images)]).to(self.device)
        options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT, "return_tensors": "pt"}
        encoded = tokenized(self.tokenizer, list(prompts), **options).to(self.device)
        return self.network(pixels, encoded.input_ids, encoded.attention_mask)


def preprocess_image(image: Image.Image) -> Tensor:
    """Return float32 `[3, 224, 224]`: shorter side resized to 224 (bicubic), center crop, CLIP's mean and deviation."""
    from torchvision.transforms import functional as transforms

    resized = transforms.resize(image, SIDE, transforms.InterpolationMode.BICUBIC)
    return transforms.normalize(transforms.to_tensor(transforms.center_crop(resized, SIDE)), _PIXEL_MEAN, _PIXEL_STD)
