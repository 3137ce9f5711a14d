"""Scorers of an `ImageTextModel`: a small image encoder paired with a text encoder. The packaged scorer is one of them.

A scorer's folder holds `config.json` and weights of an `ImageTextModel`, at its top or, as training writes them, in `scorer/`.
It may hold `text_encoder/`, `tokenizer/` and a `scorer.json`, `{"text_encoder": "emoji", "captions": ["a red apple", ...]}`,
with the packaged model whose text encoder was used in training, and the fixed captions that scores are relative to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vargen.assets
from vargen.compat import tokenized
from vargen.files import expand_user
from vargen.folders.json_files import TEXT, Kind, pick_values, read_object
from vargen.folders.networks import NetworkFolder
from vargen.folders.tokenizers import load_tokenizer
from vargen.models.storage import load_network
from vargen.models.text_encoder import ImageTextModel, MiniLMTextEncoder
from vargen.scoring.protocol import BatchedScorer, Images, to_tensor
from vargen.values import short_repr, suggest_names
from vargen.weight_files import weights_digest

FILE = "scorer.json"
_KEPT_CAPTIONS = 256
_LONGEST = 32  # maximum tokens of a caption
_AT_ONCE = 256  # captions that are encoded together
_CAPTIONS = Kind(lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value), "a list of texts")
_ENCODER = "emoji"  # source of the text encoder if a folder names none


class ImageTextScorer(BatchedScorer):
    """Scores how well an image matches its prompt: the log odds of the pair, minus those of fixed captions.

    The logit is SigLIP's (Zhai et al. 2023), `scale * cosine + bias`. Some images match any caption better than others do:
    if the folder has fixed captions, their mean logit is subtracted, so that images of one prompt can be ranked.

    Args:
        source: name of a packaged scorer (`emoji-scorer`), or a folder.
        text_encoder: a packaged model or a folder with `text_encoder/` and `tokenizer/`; by default the one of the folder.
    """

    def __init__(
        self,
        source: str | Path = "emoji-scorer",
        text_encoder: str | Path | None = None,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
    ):
        folder = scorer_folder(source)
        settings = _settings(folder)
        model, identity = load_image_tower(folder)
        self.model = model.to(device)
        encoder = _encoder_folder(folder, text_encoder or settings.get("text_encoder"))
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder / "text_encoder").to(device).eval().requires_grad_(False)
        self.tokenizer = load_tokenizer(encoder / "tokenizer", "BertTokenizerFast")
        if self.encoder.config.hidden_size != self.model.config.text_dim:
            raise ValueError(
                f"text_encoder {str(encoder)!r} gives {self.encoder.config.hidden_size} features, and the scorer in "
                f"{str(folder)!r} takes {self.model.config.text_dim}: name the encoder that it was trained with"
            )
        name = str(source) if str(source) in packaged_scorers() else Path(source).resolve().name
        super().__init__(name, device, batch_size)
        self._latest: dict[str, Tensor] = {}
        captions = settings.get("captions", [])
        self.identity = f"{identity}-{weights_digest(self.encoder)}-{captions}"
        with torch.inference_mode():
            self.baseline_embeddings = self.embed_captions(captions) if captions else None

    def embed_captions(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors `[len(texts), E]` of texts, whose features of tokens are averaged as in training."""
        means = []
        options = {"padding": True, "truncation": True, "max_length": _LONGEST, "return_tensors": "pt"}
        for start in range(0, len(texts), _AT_ONCE):
            encoded = tokenized(self.tokenizer, list(texts[start : start + _AT_ONCE]), **options).to(self.device)
            states = self.encoder(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
            mask = encoded.attention_mask[..., None].float()
            means.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return self.model.encode_text(torch.cat(means))

    def embed_images(self, images: Images) -> Tensor:
        """Return unit vectors `[N, E]` of images."""
        return self.model.encode_image(preprocess(self.model, to_tensor(images).to(self.device)))

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        image = self.embed_images(images)
        scale = self.model.pair_scale.exp().clamp(max=100)
        different = list(dict.fromkeys(prompts))  # all frames of a video share one prompt
        captions = self._embed_cached(different)[[different.index(prompt) for prompt in prompts]]
        fits = scale * (image * captions).sum(-1)
        if self.baseline_embeddings is not None:
            return fits - (scale * image @ self.baseline_embeddings.T).mean(1)
        return fits + self.model.pair_bias

    def _embed_cached(self, texts: Sequence[str]) -> Tensor:
        """Return `embed_captions(texts)` with a cache: all blocks of a video share one prompt."""
        if new := [text for text in texts if text not in self._latest]:
            if len(self._latest) + len(new) > _KEPT_CAPTIONS:
                self._latest, new = {}, list(texts)
            self._latest = {**self._latest, **dict(zip(new, self.embed_captions(new), strict=True))}
        return torch.stack([self._latest[text] for text in texts])


def preprocess(model: ImageTextModel, pixels_BCYX: Tensor) -> Tensor:
    """Convert images in [0, 1] to the image encoder's input: its size, values in [-1, 1]."""
    inputs, size = pixels_BCYX * 2 - 1, model.config.image_size
    if inputs.shape[-1] == size == inputs.shape[-2]:
        return inputs
    return F.interpolate(inputs, (size, size), mode="bilinear", antialias=True, align_corners=False)


def load_image_tower(folder: Path) -> tuple[ImageTextModel, str]:
    """Open the `ImageTextModel` of a scorer's folder; returns it with what identifies its features."""
    model = load_network(NetworkFolder(folder, ImageTextModel), torch.float32).requires_grad_(False)
    return model, f"image-text-{weights_digest(model)}"


def packaged_scorers() -> list[str]:
    """Return the names of the scorers that are packaged with the library, sorted."""
    root = Path(vargen.assets.__file__).parent
    return sorted(file.parent.relative_to(root).as_posix() for file in root.rglob(f"*/{FILE}"))


def scorer_folder(source: str | Path) -> Path:
    """Return the folder with the image encoder's `config.json`, of a packaged scorer or a local folder."""
    names = packaged_scorers()
    if str(source) in names:
        path = Path(vargen.assets.__file__).parent / str(source)
    else:
        path = expand_user(source, "scorer")
        if not path.is_dir():
            hint = suggest_names(str(source), names)
            raise ValueError(f"unknown scorer {short_repr(str(source))}: give a packaged one or a folder; {hint}")
    for folder in (path, path / "scorer"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"scorer folder {str(source)!r} holds no config.json: finish its training first")


def _settings(folder: Path) -> dict[str, Any]:
    for file in (folder / FILE, folder.parent / FILE):
        if file.is_file():
            return pick_values(read_object(file), {"text_encoder": TEXT, "captions": _CAPTIONS}, file)
    return {}


def _encoder_folder(folder: Path, named: str | Path | None) -> Path:
    """Return the folder with text encoder and tokenizer; by default the scorer's own, or `emoji`."""
    places = [folder, folder.parent, vargen.assets.packaged_model_path(_ENCODER)]
    if named is not None:
        packaged = str(named) in vargen.assets.packaged_models()
        places = [vargen.assets.packaged_model_path(str(named)) if packaged else expand_user(named, "text_encoder")]
    for place in places:
        if (place / "text_encoder").is_dir() and (place / "tokenizer").is_dir():
            return place
    raise ValueError(f"text_encoder {str(named)!r} must hold text_encoder/ and tokenizer/")
