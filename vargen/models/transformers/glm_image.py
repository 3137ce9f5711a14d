"""GLM-Image: a preview and the image in one sequence, and drafts of the image from the preview.

Shape suffixes: B images, R rows, T fed tokens, S positions, N tokens of the sequence, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import LowResModel
from vargen.folders.transformers_networks import NetworkKind
from vargen.models.offloading import read_weight
from vargen.models.transformers.base import (
    ImageLanguageModel,
    PromptRows,
    make_sliced_head,
    pad_prompts,
    validate_size,
)

_GLM_PATCH = 32  # pixels per token of the image


def preview_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the preview of an image of `size` tokens: about 16 x 16, in the same proportions."""
    (rows, columns), side = size, _GLM_PATCH // 2
    return int(math.sqrt(rows / columns) * side), int(math.sqrt(columns / rows) * side)


class PreviewDrafter(LowResModel):
    """`LowResModel` of a model that generates a preview before the image, with the same tokens.

    The draft of a token is the token of the preview at the same place. It costs no pass, and its q is 1. Tokens of the preview
    itself, and those whose place in it is not known yet, are drafted uniformly.

    Args:
        vocab: number V of tokens.
        preview, size: rows and columns of both, generated in this order.
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
        """Probabilities float32 `[B, S, V]` of draft tokens at positions `[B, S]`; see `LowResModel.probs`."""
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
        offsets, start = [], 0
        for height, width in (self.preview, size):
            place = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T.reshape(2, -1)
            offsets.append(start + torch.cat([torch.zeros(1, height * width, dtype=torch.int64), place]))
            start += max(height, width)
        self._offsets = torch.cat(offsets, 1).to(self.device)  # [3, N]
        self.vocab, self.grid = model.config.vq_config.num_embeddings, (1, self._offsets.shape[1])
        self._head = make_sliced_head(model.get_output_embeddings(), slice(self.vocab))
        self.codebook = read_weight(model.model.vqmodel.quantize.embedding).detach()
        self.low_res = PreviewDrafter(self.vocab, self.preview, size)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

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
