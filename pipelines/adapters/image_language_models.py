"""The image language models of transformers that vargen can run: how each turns prompts into tokens, and tokens into images.

Shape suffixes: B images, R rows, P prompt tokens, T fed tokens, N tokens of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vargen.pipelines.adapters.transformers import ImageLanguageModel, PromptRows
from vargen.values import short_repr


class Janus(ImageLanguageModel):
    """Janus-Pro (`JanusForConditionalGeneration`): its own embedding, aligner and head for image tokens, on a square grid."""

    class_name, since = "JanusForConditionalGeneration", "4.50"
    guidance_scale = 5.0

    def __init__(self, model: Any):
        super().__init__(model)
        self.body = model.model.language_model
        side = int(model.model.vision_model.config.num_image_tokens**0.5)
        self.grid = (side, side)
        codebook = model.model.vqmodel.quantize.embedding.weight.detach()
        self.vocab = len(codebook)
        self.codebook = torch.nn.functional.normalize(codebook.float(), dim=1)  # as the quantizer compares them

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None, guided: bool) -> PromptRows:
        if negative is not None:
            raise ValueError("negative_prompt must be None: the unconditional rows of Janus have no text")
        tokenizer = processor.tokenizer
        found = pad_prompts(
            [processor(text=[each], generation_mode="image")["input_ids"][0] for each in prompts], tokenizer.pad_token_id
        )
        if not guided:
            return found
        start = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.boi_token)
        kept = torch.isin(found.ids, torch.tensor(start))
        blank = torch.where(kept, found.ids, tokenizer.pad_token_id)
        return PromptRows(torch.cat([found.ids, blank]), found.valid.repeat(2, 1))

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        pixels = self.model.decode_image_tokens(tokens)  # [B, height, width, 3] in [-1, 1]
        return (pixels.permute(0, 3, 1, 2).float() / 2 + 0.5).clamp(0, 1)


_NEGATIVE = "lowres, bad anatomy, text, error, cropped, worst quality, low quality, jpeg artifacts, watermark, blurry"


class Emu3(ImageLanguageModel):
    """Emu3-Gen (`Emu3ForConditionalGeneration`): image tokens are a slice of the vocabulary, and each row ends with a token.

    Args:
        size: height and width of the image in tokens; 90 x 90 at 720 x 720 pixels.
    """

    class_name, since = "Emu3ForConditionalGeneration", "4.48"
    guidance_scale, top_k = 3.0, 2048

    def __init__(self, model: Any, size: tuple[int, int] = (90, 90)):
        super().__init__(model)
        self.body, self.size = model.model.text_model, size
        mapping = model.model.vocabulary_mapping
        weight = model.get_output_embeddings().weight
        ids = [mapping.img2bpe[number] for number in sorted(mapping.img2bpe)]  # in the order of the codebook
        self.ids = torch.tensor([*ids, mapping.eol_token_id], device=weight.device)
        self.vocab, self.grid = len(self.ids), (size[0], size[1] + 1)
        forced = torch.full(self.grid, -1)
        forced[:, -1] = self.vocab - 1
        self.forced = forced.flatten()
        codes = model.model.vqmodel.quantize.embedding.weight.detach().float()
        far = codes.new_full((1, codes.shape[1]), 1e4)  # the end of a row is like no token
        self.codebook = torch.cat([codes, far])
        self._head = weight.detach().index_select(0, self.ids)  # 18% of the reads of the whole head

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(self.ids[tokens])

    def head(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self._head)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None, guided: bool) -> PromptRows:
        rows, columns = self.size
        area = rows * columns * processor.downsample_ratio**2
        options = {"return_for_image_generation": True, "ratio": f"{columns}:{rows}", "image_area": area}
        found = [processor(text=[each], **options) for each in prompts]
        size = tuple(found[0]["image_sizes"][0])
        if size != self.size:
            raise ValueError(f"size must be one that Emu3's processor can write, such as {size}, got {self.size}")
        texts = [each["input_ids"][0] for each in found]
        if guided:
            texts += [processor(text=[each])["input_ids"][0] for each in negative or [_NEGATIVE] * len(prompts)]
        return pad_prompts(texts, processor.tokenizer.pad_token_id)

    def decode_pixels(self, tokens: Tensor) -> Tensor:
        ids = torch.nn.functional.pad(self.ids[tokens], (0, 3))  # its three last tokens are cut off
        pixels = self.model.decode_image_tokens(image_tokens=ids, height=self.size[0], width=self.size[1])
        pixels = pixels[:, 0] if pixels.dim() == 5 else pixels  # one frame
        return (pixels.float() / 2 + 0.5).clamp(0, 1)


class GLMImage(ImageLanguageModel):
    """GLM-Image (`GlmImageForConditionalGeneration`): a preview, then the image, in one sequence, with three axes of positions.

    Ids beyond the codebook, which mark the start and the end of images, are never sampled; transformers may sample them. The
    image is made from the tokens by diffusers' `GlmImagePipeline`; see `to_prior_tokens`.

    Args:
        size: height and width of the image in tokens of 32 x 32 pixels.
    """

    class_name, since = "GlmImageForConditionalGeneration", "5.0"
    temperature, top_p, has_pixels = 0.9, 0.75, False

    def __init__(self, model: Any, size: tuple[int, int] = (32, 32)):
        super().__init__(model)
        self.body, self.size = model.model.language_model, size
        rows, columns = size
        side = _GLM_PATCH // 2  # the preview has about 16 x 16 tokens
        self.preview = int(math.sqrt(rows / columns) * side), int(math.sqrt(columns / rows) * side)
        offsets, start = [], 0
        for height, width in (self.preview, size):
            place = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T.reshape(2, -1)
            offsets.append(start + torch.cat([torch.zeros(1, height * width, dtype=torch.int64), place]))
            start += max(height, width)
        weight = model.get_output_embeddings().weight
        self._offsets = torch.cat(offsets, 1).to(weight.device)  # [3, N]
        self.vocab, self.grid = model.config.vq_config.num_embeddings, (1, self._offsets.shape[1])
        self._head = weight.detach()[: self.vocab]
        self.codebook = model.model.vqmodel.quantize.embedding.weight.detach()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self._head)

    def positions(self, start: Tensor, index: Tensor) -> Tensor:
        return start[None, :, None] + self._offsets[:, index.clamp(max=self.grid[1] - 1)]

    def prompt_positions(self, positions: Tensor) -> Tensor:
        return positions.expand(3, -1, -1)

    def encode_prompts(self, processor: Any, prompts: list[str], negative: list[str] | None, guided: bool) -> PromptRows:
        if guided or negative is not None:
            raise ValueError("guidance_scale must be 1, and negative_prompt None: GLM-Image has no unconditional prompt")
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


_GLM_PATCH = 32  # pixels per token of the image
MODELS: dict[str, type[ImageLanguageModel]] = {each.class_name: each for each in (Janus, Emu3, GLMImage)}


def describe_language_model(model: Any, **options: Any) -> ImageLanguageModel:
    """Return the description of a model of transformers.

    Args:
        options: of the description, such as `size` of Emu3.

    Raises:
        TypeError: if vargen has no description of its class, or the description does not take an option.
    """
    found = MODELS.get(type(model).__name__)
    if found is None:
        raise TypeError(f"model must be one of {', '.join(MODELS)} of transformers, got {short_repr(type(model).__name__)}")
    return found(model, **options)


def pad_prompts(rows: Sequence[Sequence[int] | Tensor], pad: int) -> PromptRows:
    """Return rows of different lengths as one table, padded on the left with `pad`."""
    P = max(len(row) for row in rows)
    ids, valid = torch.full((len(rows), P), pad), torch.zeros(len(rows), P, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, P - len(row) :], valid[number, P - len(row) :] = torch.as_tensor(row), True
    return PromptRows(ids, valid)
