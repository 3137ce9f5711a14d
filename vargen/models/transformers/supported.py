"""The image language models of transformers that vargen can run: how each turns prompts into tokens, and tokens into images.

Shape suffixes: B images, R rows, P prompt tokens, T fed tokens, N tokens of the grid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vargen.folders.transformers_networks import NetworkKind
from vargen.models.offloading import read_weight
from vargen.models.transformers.base import (
    ImageLanguageModel,
    PromptRows,
    make_sliced_head,
    pad_prompts,
    validate_size,
)
from vargen.models.transformers.glm_image import GLMImage
from vargen.values import short_repr
from vargen.weight_files import weights_digest


class Janus(ImageLanguageModel):
    """Janus-Pro (`JanusForConditionalGeneration`): its own embedding, aligner and head for image tokens, on a square grid."""

    class_name, since, processor_name = "JanusForConditionalGeneration", "4.50", "JanusProcessor"
    stored = NetworkKind(
        class_name,
        "janus",
        {"text_config": "LlamaConfig", "vision_config": "JanusVisionConfig", "vq_config": "JanusVQVAEConfig"},
    )
    tokenizer_names, image_processor_name = ("LlamaTokenizerFast", "PreTrainedTokenizerFast"), "JanusImageProcessor"
    special_tokens = ("pad_token", "bos_token", "boi_token")
    guidance_scale = 5.0

    def __init__(self, model: Any):
        super().__init__(model)
        self.body = model.model.language_model
        side = int(model.model.vision_model.config.num_image_tokens**0.5)
        self.grid = (side, side)
        codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self.vocab = len(codebook)
        self.codebook = torch.nn.functional.normalize(codebook.float(), dim=1)  # as the quantizer compares them

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    @property
    def head_digest(self) -> str:
        return weights_digest(self.model.model.generation_head)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        if negative is not None:
            raise ValueError("negative_prompt must be None: the unconditional rows of Janus have no text")
        tokenizer = processor.tokenizer
        found = pad_prompts(
            [processor(text=[each], generation_mode="image")["input_ids"][0] for each in prompts], tokenizer.pad_token_id
        )
        start = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.boi_token)
        kept = torch.isin(found.ids, torch.tensor(start))
        blank = torch.where(kept, found.ids, tokenizer.pad_token_id)
        return PromptRows(found.ids, found.valid, PromptRows(blank, found.valid))

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        pixels = self.model.decode_image_tokens(tokens)  # [B, height, width, 3] in [-1, 1]
        return (pixels.permute(0, 3, 1, 2).float() / 2 + 0.5).clamp(0, 1)


_NEGATIVE = "lowres, bad anatomy, text, error, cropped, worst quality, low quality, jpeg artifacts, watermark, blurry"


class Emu3(ImageLanguageModel):
    """Emu3-Gen (`Emu3ForConditionalGeneration`): image tokens are a slice of the vocabulary, and each row ends with a token.

    Args:
        size: height and width of the image in tokens; 90 x 90 at 720 x 720 pixels.
        negative_format: `"text"` for a negative prompt without the size of the image, as in the documentation of transformers;
            `"image"` for one with it, as in the code of the paper (arXiv 2409.18869).
    """

    class_name, since, processor_name = "Emu3ForConditionalGeneration", "4.48", "Emu3Processor"
    stored = NetworkKind(
        class_name,
        "emu3",
        {"text_config": "Emu3TextConfig", "vq_config": "Emu3VQVAEConfig"},
        renamed=(
            (r"^text_model\.lm_head\.", "lm_head."),
            (r"^text_model\.model\.", "model.text_model."),
            (r"^vqmodel\.", "model.vqmodel."),
        ),
    )
    tokenizer_names, image_processor_name = ("GPT2TokenizerFast",), "Emu3ImageProcessor"
    guidance_scale, top_k = 3.0, 2048
    options = ("size", "negative_format")

    def __init__(self, model: Any, size: tuple[int, int] = (90, 90), negative_format: str = "text"):
        super().__init__(model)
        self.body, self.size = model.model.text_model, validate_size(size)
        if negative_format not in ("text", "image"):
            raise ValueError(f"negative_format must be 'text' or 'image', got {short_repr(negative_format)}")
        self.negative_format = negative_format
        mapping = model.model.vocabulary_mapping
        ids = [mapping.img2bpe[number] for number in sorted(mapping.img2bpe)]  # in the order of the codebook
        self.ids = torch.tensor([*ids, mapping.eol_token_id], device=self.device)
        self.vocab, self.grid = len(self.ids), (size[0], size[1] + 1)
        forced = torch.full(self.grid, -1)
        forced[:, -1] = self.vocab - 1
        self.forced = forced.flatten()
        codes = read_weight(model.model.vqmodel.quantize.embedding).detach().float()
        far = codes.new_full((1, codes.shape[1]), 1e4)  # the end of a row is like no token
        self.codebook = torch.cat([codes, far])
        self._head = make_sliced_head(model.get_output_embeddings(), self.ids)  # 18% of the reads of the whole head

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(self.ids[tokens])

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        rows, columns = self.size
        area = rows * columns * processor.downsample_ratio**2
        options = {"return_for_image_generation": True, "ratio": f"{columns}:{rows}", "image_area": area}
        found = [processor(text=[each], **options) for each in prompts]
        size = tuple(found[0]["image_sizes"][0])
        if size != self.size:
            raise ValueError(f"size must be one that Emu3's processor can write, such as {size}, got {self.size}")
        own = options if self.negative_format == "image" else {}
        blank = [processor(text=[each], **own)["input_ids"][0] for each in negative or [_NEGATIVE] * len(prompts)]
        texts, pad = [each["input_ids"][0] for each in found], processor.tokenizer.pad_token_id
        return replace(pad_prompts(texts, pad), unconditional=pad_prompts(blank, pad))

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        ids = torch.nn.functional.pad(self.ids[tokens], (0, 3))  # its three last tokens are cut off
        pixels = self.model.decode_image_tokens(image_tokens=ids, height=self.size[0], width=self.size[1])
        pixels = pixels[:, 0] if pixels.dim() == 5 else pixels  # one frame
        return (pixels.float() / 2 + 0.5).clamp(0, 1)


class Chameleon(ImageLanguageModel):
    """Chameleon and models of its class, such as Anole (`ChameleonForConditionalGeneration`): a slice of the vocabulary.

    transformers masks image tokens in its own `generate`, and has no decoder for them: the tokens are returned. Unconditional
    rows, for a guidance scale other than 1, begin at the token that starts the image, as in Lumina-mGPT (arXiv 2408.02657).
    """

    class_name, since, processor_name = "ChameleonForConditionalGeneration", "4.43", "ChameleonProcessor"
    stored = NetworkKind(class_name, "chameleon", {"vq_config": "ChameleonVQVAEConfig"})
    tokenizer_names, image_processor_name = ("LlamaTokenizerFast", "PreTrainedTokenizerFast"), "ChameleonImageProcessor"
    has_pixels = False

    def __init__(self, model: Any):
        super().__init__(model)
        self.body = model.model
        mapping, vq = model.model.vocabulary_mapping, model.config.vq_config
        side = vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)
        self.ids = torch.tensor([mapping.img2bpe[number] for number in sorted(mapping.img2bpe)], device=self.device)
        self.vocab, self.grid = len(self.ids), (side, side)
        self.codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self._head = make_sliced_head(model.get_output_embeddings(), self.ids)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(self.ids[tokens])

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        tokenizer, start = processor.tokenizer, processor.image_start_token_id
        texts = [processor(text=[each], return_for_text_completion=True)["input_ids"][0] for each in prompts]
        blank: list[Any] = [[]] * len(prompts)
        if negative is not None:
            blank = [processor(text=[each], return_for_text_completion=True)["input_ids"][0] for each in negative]
        own, other = (pad_prompts([[*each, start] for each in rows], tokenizer.pad_token_id) for rows in (texts, blank))
        return replace(own, unconditional=other)


MODELS: dict[str, type[ImageLanguageModel]] = {each.class_name: each for each in (Janus, Emu3, GLMImage, Chameleon)}


def describe_language_model(model: Any, **options: Any) -> ImageLanguageModel:
    """Return the description of a model of transformers.

    Args:
        options: of its constructor, such as `size`, rows and columns of the image in tokens. None selects the published value.
    """
    found = MODELS.get(type(model).__name__)
    if found is None:
        raise TypeError(f"model must be one of {', '.join(MODELS)} of transformers, got {short_repr(type(model).__name__)}")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in found.options:
            raise TypeError(f"{name} must be None for a {found.class_name}, got {short_repr(value)}")
    return found(model, **given)
