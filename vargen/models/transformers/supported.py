"""The image language models of transformers that vargen can run: how each turns prompts into tokens, and tokens into images.

Shape suffixes: B images, R rows, P prompt tokens, T fed tokens, S positions, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.compat import installed_version
from vargen.decoding import LowResModel
from vargen.folders.transformers_networks import NetworkKind
from vargen.models.storage import read_weight
from vargen.models.transformers.base import (
    ImageLanguageModel,
    PromptRows,
    force_row_ends,
    pad_prompts,
    tokenize,
    validate_size,
)
from vargen.models.transformers.causal import NETWORKS, CausalLanguageModel, Liquid, SimpleAR, Tar
from vargen.models.transformers.emu3_5 import Emu35
from vargen.models.transformers.own_networks import MammothModa2, XOmni
from vargen.values import short_repr
from vargen.weight_files import weights_digest


class Janus(ImageLanguageModel):
    """Janus-Pro (`JanusForConditionalGeneration`): its own embedding, aligner and head for image tokens, on a square grid."""

    class_name, since, processor_name = "JanusForConditionalGeneration", "4.52", "JanusProcessor"
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
        count = int(model.model.vision_model.config.num_image_tokens)
        side = math.isqrt(count)
        self.grid = (side, side) if side**2 == count else (1, count)
        codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self.vocab = len(codebook)
        self.codebook = F.normalize(codebook.float(), dim=1)  # as the quantizer compares them

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    def head_layers(self) -> list[tuple[Tensor, Tensor | None]]:
        head = self.model.model.generation_head
        return [(each.weight.detach(), each.bias.detach()) for each in (head.proj_out, head.vision_head)]

    @property
    def head_digest(self) -> str:
        return weights_digest(self.model.model.generation_head)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        if negative is not None:
            raise ValueError("negative_prompt must be None: the unconditional rows of Janus have no text")
        tokenizer = processor.tokenizer
        found = pad_prompts(tokenize(processor, prompts, generation_mode="image"), tokenizer.pad_token_id)
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

    class_name, since, processor_name = "Emu3ForConditionalGeneration", "4.53", "Emu3Processor"
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
        self.forced = force_row_ends(self.grid, self.vocab - 1)
        codes = read_weight(model.model.vqmodel.quantize.embedding).detach().float()
        far = codes.new_full((1, codes.shape[1]), 1e4)  # the end of a row is like no token
        self.codebook = torch.cat([codes, far])

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        rows, columns = self.size
        area = rows * columns * processor.downsample_ratio**2
        options = {"return_for_image_generation": True, "ratio": f"{columns}:{rows}", "image_area": area}
        found = [processor(text=[each], **options) for each in prompts]
        size = tuple(found[0]["image_sizes"][0])
        if size != self.size:
            raise ValueError(f"size must be one that Emu3's processor can write, such as {size}, got {self.size}")
        own = options if self.negative_format == "image" else {}
        blank = tokenize(processor, negative or [_NEGATIVE] * len(prompts), **own)
        texts, pad = [each["input_ids"][0] for each in found], processor.tokenizer.pad_token_id
        return replace(pad_prompts(texts, pad), unconditional=pad_prompts(blank, pad))

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        assert self.ids is not None
        ids = F.pad(self.ids[tokens], (0, 3))  # its three last tokens are cut off
        pixels = self.model.decode_image_tokens(image_tokens=ids, height=self.size[0], width=self.size[1])
        pixels = pixels[:, 0] if pixels.dim() == 5 else pixels  # one frame
        return (pixels.float() / 2 + 0.5).clamp(0, 1)


class Chameleon(ImageLanguageModel):
    """Chameleon and models of its class, such as Anole (`ChameleonForConditionalGeneration`): a slice of the vocabulary.

    transformers masks image tokens in its own `generate`, and has no decoder for them: without `vision_tokenizer`, that of the
    official files (`vqgan.ckpt`), the tokens are returned. Unconditional rows, for a guidance scale other than 1, begin at the
    token that starts the image, as in Lumina-mGPT (arXiv 2408.02657).
    """

    class_name, since, processor_name = "ChameleonForConditionalGeneration", "4.53", "ChameleonProcessor"
    stored = NetworkKind(class_name, "chameleon", {"vq_config": "ChameleonVQVAEConfig"})
    tokenizer_names, image_processor_name = ("LlamaTokenizerFast", "PreTrainedTokenizerFast"), "ChameleonImageProcessor"
    has_pixels = has_generate = False
    options = ("vision_tokenizer",)

    def __init__(self, model: Any, vision_tokenizer: Any = None):
        super().__init__(model)
        self.body = model.model
        mapping, vq = model.model.vocabulary_mapping, model.config.vq_config
        side = vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)
        self.ids = torch.tensor([mapping.img2bpe[number] for number in sorted(mapping.img2bpe)], device=self.device)
        self.vocab, self.grid = len(self.ids), (side, side)
        self.codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self.decode_by(vision_tokenizer, self.vocab)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        tokenizer, start = processor.tokenizer, processor.image_start_token_id
        texts = tokenize(processor, prompts, return_for_text_completion=True)
        blank: list[Any] = [[]] * len(prompts)
        if negative is not None:
            blank = tokenize(processor, negative, return_for_text_completion=True)
        own, other = (pad_prompts([[*each, start] for each in rows], tokenizer.pad_token_id) for rows in (texts, blank))
        return replace(own, unconditional=other)


_GLM_PATCH = 32  # pixels per token of the image


def preview_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the preview of an image of `size` tokens: about 16 x 16, in the same proportions."""
    (rows, columns), side = size, _GLM_PATCH // 2
    return int(math.sqrt(rows / columns) * side), int(math.sqrt(columns / rows) * side)


def grid_offsets(sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the positions `[3, N]` of the tokens of grids of some rows and columns, one after the other, after a prompt."""
    offsets, start = [], 0
    for height, width in sizes:
        place = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T.reshape(2, -1)
        offsets.append(start + torch.cat([torch.zeros(1, height * width, dtype=torch.int64), place]))
        start += max(height, width)
    return torch.cat(offsets, 1)


class PreviewDrafter(LowResModel):
    """`LowResModel` of a model that generates a preview before the image, with the same tokens.

    The draft of a token is the token of the preview at the same place. It costs no pass, and its q is 1. Tokens of the preview
    itself, and those whose place in it is not known yet, are drafted uniformly. `preview` and `size` are rows and columns.
    """

    def __init__(self, vocab: int, preview: tuple[int, int], size: tuple[int, int]):
        self.vocab, self.grid = vocab, (1, preview[0] * preview[1] + size[0] * size[1])
        self.preview, self.size = preview, size

    def start(self, condition: Any, seeds: Tensor, sampling: Any) -> Tensor:
        """Return the seeds, because there is nothing to generate beforehand."""
        return seeds

    def source(self, position: Tensor) -> Tensor:
        """Return the positions in the preview that show the place of positions `[B, S]`; those of the preview are -1."""
        (r, c), (R, C) = self.preview, self.size
        cell = position - r * c
        row, column = cell // C, cell % C
        return torch.where(cell < 0, -1, row * r // R * c + column * c // C)

    def probs(self, images: Tensor, tokens: Tensor, length: Tensor, position: Tensor, sampling: Any) -> Tensor:
        source = self.source(position)
        known = (source >= 0) & (source < length[:, None])
        shown = F.one_hot(tokens.gather(1, source.clamp(min=0)), self.vocab).float()
        return torch.where(known[..., None], shown, 1 / self.vocab)


class GLMImage(ImageLanguageModel):
    """GLM-Image (`GlmImageForConditionalGeneration`): a preview, then the image, in one sequence, with three axes of positions.

    Ids beyond the codebook, which mark the start and the end of images, are never sampled; transformers may sample them. The
    image is made from the tokens by diffusers' `GlmImagePipeline`; see `to_prior_tokens`.

    Args:
        size: height and width of the image in tokens of 32 x 32 pixels.
    """

    class_name, since, processor_name = "GlmImageForConditionalGeneration", "5.0", "GlmImageProcessor"
    stored = NetworkKind(
        class_name,
        "glm_image",
        {"text_config": "GlmImageTextConfig", "vision_config": "GlmImageVisionConfig", "vq_config": "GlmImageVQVAEConfig"},
    )
    tokenizer_names, image_processor_name = ("PreTrainedTokenizerFast",), "GlmImageImageProcessor"
    uses_template = True
    temperature, top_p, guided, has_pixels = 0.9, 0.75, False, False
    options = ("size",)

    def __init__(self, model: Any, size: tuple[int, int] = (32, 32)):
        super().__init__(model)
        self.body, self.size = model.model.language_model, validate_size(size)
        self.preview = preview_size(size)
        self._offsets = grid_offsets((self.preview, size)).to(self.device)  # [3, N]
        self.vocab, self.grid = model.config.vq_config.num_embeddings, (1, self._offsets.shape[1])
        self.codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self.low_res = PreviewDrafter(self.vocab, self.preview, size)

    def positions(self, start: Tensor, index: Tensor) -> Tensor:
        return start[None, :, None] + self._offsets[:, index.clamp(max=self.grid[1] - 1)]

    def prompt_positions(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1, -1)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None) -> PromptRows:
        if negative is not None:
            raise ValueError("negative_prompt must be None: GLM-Image has no unconditional prompt")
        rows, columns = self.size
        texts = []
        for prompt in prompts:
            messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
            size = {"target_h": rows * _GLM_PATCH, "target_w": columns * _GLM_PATCH}
            found = processor.apply_chat_template([messages], tokenize=True, processor_kwargs=size, return_dict=True)
            texts.append(found["input_ids"][0])
        return pad_prompts(texts, processor.tokenizer.pad_token_id)

    def to_prior_tokens(self, tokens: Tensor) -> Tensor:
        """Return `prior_token_ids` of diffusers' `GlmImagePipeline`: the image's tokens on a grid of twice its size."""
        grid = tokens[:, self.preview[0] * self.preview[1] :].unflatten(1, self.size)
        return grid.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


MODELS: dict[str, type[ImageLanguageModel]] = {
    each.class_name: each for each in (Janus, Emu3, GLMImage, Chameleon, XOmni, MammothModa2)
}
IMAGE_MODELS: tuple[type[CausalLanguageModel], ...] = (Liquid, SimpleAR, Tar, Emu35, XOmni, MammothModa2)


def validate_release(language_model: type[ImageLanguageModel]) -> None:
    """Check that the installed transformers has the class of a model with the weights and the processor that vargen expects."""
    installed, since = installed_version("transformers") or "0", language_model.since
    if tuple(map(int, installed.split(".")[:2])) < tuple(map(int, since.split("."))):
        raise ValueError(f"{language_model.class_name} needs transformers {since} or newer, got {installed}")


def find_class(model: Any) -> str:
    """Return the name of the class of transformers, or ours, that a model or its class derives from; "" for another object."""
    names = (each.__name__ for each in type(model).__mro__)
    return next((name for name in names if name in MODELS or name in NETWORKS), "")


def find_description(model: Any) -> type[ImageLanguageModel] | None:
    """Return the class that describes a model of transformers, or of a subclass of its class; None for another object."""
    name = find_class(model)
    return CausalLanguageModel if name in NETWORKS else MODELS.get(name)


def find_image_model(class_name: str, tokenizer: Any) -> type[CausalLanguageModel]:
    """Return the image model of a class of transformers that a tokenizer belongs to; ValueError for that of a text model."""
    candidates = [each for each in IMAGE_MODELS if each.class_name == class_name]
    known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    for each in candidates:
        if all(mark in known for mark in each.marks):
            return each
    names = ", or ".join(f"{' and '.join(each.marks)} of {each.name}" for each in candidates)
    raise ValueError(f"this {class_name} generates text: its tokenizer lacks the special tokens {names}")


def describe_language_model(model: Any, processor: Any = None, **options: Any) -> ImageLanguageModel:
    """Return the description of a model of transformers, or of a subclass of its class.

    Options are those of its constructor, such as `size`, rows and columns of the image in tokens. None: the published value.
    Of a class that text models have, too, the tokenizer `processor` tells which image model it is.
    """
    found = find_description(model)
    if found is None:
        raise TypeError(f"model must be one of {', '.join(MODELS)} of transformers, got {short_repr(type(model).__name__)}")
    validate_release(found)
    given = {name: value for name, value in options.items() if value is not None}
    if issubclass(found, CausalLanguageModel) and processor is not None:
        found, given["tokenizer"] = find_image_model(find_class(model), processor), processor
    for name, value in given.items():
        if name not in (*found.options, "tokenizer"):
            raise TypeError(f"{name} must be None for a {found.class_name}, got {short_repr(value)}")
    return found(model, **given)
