"""Emu3.5-Image 34B (arXiv 2510.26583), as the token loop sees it: tokens of an IBQ codebook, whose rows end with a token.

Its layers are those of Emu3 with normalized queries and keys, which are the layers of Qwen3.

Shape suffixes: B images, R rows, T tokens, D feature width, N tokens of the grid, V image tokens with the two that end rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.folders.transformers_networks import NetworkKind
from vargen.models.transformers.base import force_row_ends
from vargen.models.transformers.causal import CausalLanguageModel

# By the class that official folders name, what they hold.
OFFICIAL = {
    "Emu3ForCausalLM": NetworkKind("Qwen3ForCausalLM", "Emu3", defaults={"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5})
}
_ENDS = ("<|extra_200|>", "<|image end|>")  # of a row, and of the last one


class Emu35(CausalLanguageModel):
    """Emu3.5-Image: Qwen3 with 131,072 image tokens in its tokenizer, for text to image.

    The size is given, as `target_height` and `target_width` of the official program, which else has the model generate it.

    Args:
        size: rows and columns of the image in tokens of 16 x 16 pixels.
        vision_tokenizer: see `ImageLanguageModel`.
    """

    class_name, name, marks = "Qwen3ForCausalLM", "Emu3.5", ("<|image start|>", "<|visual token 000000|>", *_ENDS)
    published_size, token_format = (64, 64), "<|visual token {:06d}|>"
    prompt_format = "<|extra_203|>You are a helpful assistant for t2i task. USER: {} ASSISTANT: <|extra_100|>"
    negative_format = "<|extra_203|>You are a helpful assistant. USER: {} ASSISTANT: <|extra_100|>"
    guidance_scale, top_k = 5.0, 5120
    options: tuple[str, ...] = ("size", "vision_tokenizer")

    def __init__(self, model: Any, tokenizer: Any, size: tuple[int, int] | None = None, vision_tokenizer: Any = None):
        super().__init__(model, tokenizer, size)
        (rows, columns), codes = self.size, self.vocab
        begin = f"<|image start|>{rows}*{columns}<|image token|>"
        self.prompt_format, self.negative_format = self.prompt_format + begin, self.negative_format + begin
        self.blank = self.negative_format.format("")
        first, *ends = tokenizer.convert_tokens_to_ids([self.token_format.format(0), *_ENDS])
        if max(ends) >= (embedded := model.get_input_embeddings().num_embeddings):
            raise ValueError(
                f"processor must be that of the model, which embeds {embedded} tokens, got one of {len(tokenizer)}"
            )
        self._codes = slice(first, first + codes)
        self.ids = torch.tensor([*range(first, first + codes), *ends], device=self.device)
        self.vocab, self.grid = codes + len(ends), (rows, columns + 1)
        self.forced = force_row_ends(self.grid, codes)
        self.forced[-1] = codes + 1
        self.decode_by(vision_tokenizer, codes)
        if self.codebook is not None:
            far = torch.tensor([[1e4], [2e4]], device=self.codebook.device)  # the ends are like no token
            self.codebook = torch.cat([self.codebook, far.expand(-1, self.codebook.shape[1])])

    @property
    def head_rows(self) -> slice:
        return self._codes

    def head(self, hidden: Tensor) -> Tensor:
        return F.pad(super().head(hidden), (0, len(_ENDS)))  # whose logits are never read: they are forced, or excluded

    def head_layers(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.model.get_output_embeddings().weight.detach()[self.ids], None)]

    def image_codes(self, tokens: Tensor) -> Tensor:
        return super().image_codes(tokens)[..., :-1]
