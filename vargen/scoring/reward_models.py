"""Models of human preference for an image given its prompt, with local weights: ImageReward and PickScore.

ImageReward (Xu et al. 2023, arXiv:2304.05977) is a BLIP vision transformer, a BERT with cross-attention to its features, and
five linear layers on the first token. PickScore (Kirstain et al. 2023, arXiv:2305.01569) is a CLIP model. Networks are
transformers' classes; the official file of ImageReward, whose names are mapped, is read as data only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from vargen.assets import packaged_model_path
from vargen.compat import tokenized
from vargen.folders.tokenizers import choose_class, load_tokenizer
from vargen.folders.transformers_networks import NetworkKind, StoredNetwork
from vargen.scoring.protocol import BatchedScorer, Images, require_local_file, to_pil
from vargen.weight_files import list_shapes, load_pickle_safely, rename, validate_shapes, weights_digest

SIDE = 224  # pixels of both models
_PIXEL_MEAN, _PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # as for CLIP


def preprocess_images(images: Images) -> Tensor:
    """Return float32 `[N, 3, 224, 224]`: shorter side resized to 224 (bicubic), center crop, CLIP's normalization."""
    from torchvision.transforms import functional as transforms

    resized = [transforms.resize(image, SIDE, transforms.InterpolationMode.BICUBIC) for image in to_pil(images)]
    pixels = torch.stack([transforms.to_tensor(transforms.center_crop(image, SIDE)) for image in resized])
    return transforms.normalize(pixels, _PIXEL_MEAN, _PIXEL_STD)


SCORE_MEAN, SCORE_STD = 0.16717362830052426, 1.0333394966054072  # of the official training scores
CONTEXT = 35  # prompt tokens; longer prompts are truncated
VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "image_size": SIDE,
    "layer_norm_eps": 1e-6,
}
TEXT: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30524,
    "max_position_embeddings": 512,
    "encoder_hidden_size": VISION["hidden_size"],
    "layer_norm_eps": 1e-12,
    "is_decoder": True,
}
_IMAGE_REWARD = "fetch ImageReward.pt of the hub model THUDM/ImageReward (1.8 GB) and give weights=FILE"
# Official names to ours, as regular expressions in this order. Those inside of the text encoder need no change.
_NAMES = (
    (r"^mlp\.layers\.", "mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^blip\.visual_encoder\.", "vision."),
    (r"^vision\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^vision\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.norm\.", "vision.post_layernorm."),
    (r"^vision\.blocks\.(\d+)\.", r"vision.encoder.layers.\1."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.", ".self_attn."),
)


class ImageRewardNetwork(nn.Module):
    """Vision transformer, text encoder, and linear layers without activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = BlipVisionModel(BlipVisionConfig(**VISION))
        self.text = BlipTextModel(BlipTextConfig(**TEXT), add_pooling_layer=False)
        widths = (TEXT["hidden_size"], 1024, 128, 64, 16, 1)
        linear = [nn.Linear(a, b) for a, b in pairwise(widths)]
        dropout = nn.Identity()  # in training; the official indices count it
        self.mlp = nn.Sequential(linear[0], dropout, linear[1], dropout, linear[2], dropout, linear[3], linear[4])

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


def build_image_reward(official: dict[str, Tensor], file: Path) -> ImageRewardNetwork:
    """Build the network with the weights of an official state dict, in float32; errors name `file`."""
    state: dict[str, Tensor] = {}
    for name, value in official.items():
        name = rename(name, _NAMES)
        if name.startswith(("vision.", "text.", "mlp.")) and not name.endswith("position_ids"):
            state[name] = value.float()
    with torch.device("meta"):
        network = ImageRewardNetwork()
    validate_shapes(list_shapes(state), list_shapes(network.state_dict()), str(file))
    network.load_state_dict(state, assign=True)
    for module in network.modules():  # a buffer stored in no file
        if isinstance(ids := getattr(module, "position_ids", None), Tensor):
            module.position_ids = torch.arange(ids.numel())[None]
    return network.eval().requires_grad_(False)


class ImageRewardScorer(BatchedScorer):
    """ImageReward.

    Args:
        weights: the official `ImageReward.pt`.
        tokenizer: folder with the tokenizer of bert-base-uncased. Default: that of `emoji`, which has the same vocabulary.
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        tokenizer: str | Path | None = None,
        device: torch.device | str = "cpu",
        batch_size: int = 16,
    ):
        file = require_local_file(weights, "weights", "ImageReward", _IMAGE_REWARD)
        words = packaged_model_path("emoji") / "tokenizer" if tokenizer is None else tokenizer
        folder = require_local_file(words, "tokenizer", "ImageReward", "give a folder with bert-base-uncased's vocab.txt")
        self.tokenizer = load_tokenizer(folder, "BertTokenizerFast")
        self.network = build_image_reward(load_pickle_safely(file, advice=_IMAGE_REWARD), file).to(device)
        self.identity = f"image-reward-{weights_digest(self.network)}"
        super().__init__("image-reward", device, batch_size)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        pixels = preprocess_images(images).to(self.device)
        options = {"padding": "max_length", "truncation": True, "max_length": CONTEXT, "return_tensors": "pt"}
        encoded = tokenized(self.tokenizer, list(prompts), **options).to(self.device)
        return self.network(pixels, encoded.input_ids, encoded.attention_mask)


_CLIP = NetworkKind("CLIPModel", "clip", {"text_config": "CLIPTextConfig", "vision_config": "CLIPVisionConfig"})
_PICK_SCORE = "fetch the hub model yuvalkirstain/PickScore_v1 and give weights=FOLDER"


class PickScoreScorer(BatchedScorer):
    """PickScore, or another CLIP model: the cosine times the logit scale, about 20 for a good image.

    Args:
        weights: folder of a `CLIPModel` of transformers with safetensors, whose images have 224 x 224 pixels.
        tokenizer: folder of its tokenizer. Default: that of the weights.
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        tokenizer: str | Path | None = None,
        device: torch.device | str = "cpu",
        batch_size: int = 16,
    ):
        folder = require_local_file(weights, "weights", "PickScore", _PICK_SCORE)
        words = folder if tokenizer is None else require_local_file(tokenizer, "tokenizer", "PickScore", _PICK_SCORE)
        try:
            stored = StoredNetwork(folder, _CLIP)
            if (side := stored.config.vision_config.image_size) != SIDE:
                raise ValueError(f"its images have {side} pixels, expected {SIDE}")
            self.network = stored.load().to(device)
            self.tokenizer = load_tokenizer(words, choose_class(words, "CLIPTokenizerFast", "PreTrainedTokenizerFast"))
        except ValueError as error:
            raise ValueError(f"cannot use weights {str(folder)!r} and tokenizer {str(words)!r}: {error}") from error
        self.length = self.network.config.text_config.max_position_embeddings
        self.identity = f"pick-score-{weights_digest(self.network)}"
        super().__init__("pick-score", device, batch_size)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        pixels = preprocess_images(images).to(self.device)
        options = {"padding": True, "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        encoded = tokenized(self.tokenizer, list(prompts), **options).to(self.device)
        output = self.network(pixel_values=pixels, input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        image, text = F.normalize(output.image_embeds, dim=-1), F.normalize(output.text_embeds, dim=-1)
        return self.network.logit_scale.exp() * (image * text).sum(-1)
