"""PickScore (Kirstain et al. 2023, arXiv:2305.01569) and other CLIP models of transformers, with local weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.compat import ensure_torchvision, tokenized
from vargen.folders.json_files import read_config
from vargen.folders.tokenizers import choose_class, load_tokenizer
from vargen.folders.transformers_networks import NetworkKind, StoredNetwork
from vargen.scoring.image_reward import SIDE, preprocess_image
from vargen.scoring.protocol import BatchedScorer, Images, require_local_file, to_pil
from vargen.weight_files import weights_digest

ensure_torchvision()

_CLIP = NetworkKind("CLIPModel", "clip", {"text_config": "CLIPTextConfig", "vision_config": "CLIPVisionConfig"})
_HOW = "fetch the hub model yuvalkirstain/PickScore_v1 and give weights=FOLDER"


class PickScoreScorer(BatchedScorer):
    """Cosine of image and prompt embeddings times the model's logit scale: about 20 for a good image.

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
        folder = require_local_file(weights, "weights", "PickScore", _HOW)
        words = require_local_file(folder if tokenizer is None else tokenizer, "tokenizer", "PickScore", _HOW)
        config = read_config(folder / "config.json")
        side = (config.get("vision_config") or {}).get("image_size", SIDE)
        if config.get("model_type") != "clip" or side != SIDE:
            kind = f"model_type {config.get('model_type')!r} with images of {side} pixels"
            raise ValueError(f"weights {str(folder)!r} must be a CLIP model for images of {SIDE} pixels, got {kind}")
        try:
            self.network = StoredNetwork(folder, _CLIP).load().to(device)
            self.tokenizer = load_tokenizer(words, choose_class(words, "CLIPTokenizerFast", "PreTrainedTokenizerFast"))
        except ValueError as error:
            raise ValueError(f"cannot use weights {str(folder)!r} and tokenizer {str(words)!r}: {error}") from error
        self.length = self.network.config.text_config.max_position_embeddings
        self.identity = f"pick-score-{weights_digest(self.network)}"
        super().__init__("pick-score", True, device, batch_size)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        pixels = torch.stack([preprocess_image(image) for image in to_pil(images)]).to(self.device)
        options = {"padding": True, "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        encoded = tokenized(self.tokenizer, list(prompts), **options).to(self.device)
        output = self.network(pixel_values=pixels, input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        image, text = F.normalize(output.image_embeds, dim=-1), F.normalize(output.text_embeds, dim=-1)
        return self.network.logit_scale.exp() * (image * text).sum(-1)
