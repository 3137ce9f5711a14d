"""The language model of X-Omni (arXiv 2507.22058): Qwen2 whose first and last layers change image tokens alone.

Text and image tokens have embeddings and final norms of their own. A last column of the states says which are image tokens.

Shape suffixes: R rows, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm


class MarkedEmbedding(nn.Module):
    """Embeddings float `[R, T, D + 1]` of ids `[R, T]`: those of text, behind them those of image tokens."""

    def __init__(self, text: int, image: int, width: int):
        super().__init__()
        self.text, self.image = nn.Embedding(text, width), nn.Embedding(image, width)
        self.num_embeddings = text + image

    @property
    def weight(self) -> Tensor:
        """Float `[text, D]`, whose dtype is that of the network."""
        return self.text.weight

    def forward(self, ids: Tensor) -> Tensor:
        is_image = (ids >= self.text.num_embeddings)[..., None]
        image = self.image((ids - self.text.num_embeddings).clamp(min=0))
        found = torch.where(is_image, image, self.text(ids.masked_fill(is_image[..., 0], 0)))
        return torch.cat([found, is_image.to(found.dtype)], -1)


class MarkedLayer(Qwen2DecoderLayer):
    """A layer over states float `[R, T, D + 1]`, which leaves those of text as they are if it is one of image tokens."""

    def __init__(self, config: Any, number: int):
        super().__init__(config, number)
        self.changes_text = config.num_mm_adap_layers <= number < config.num_hidden_layers - config.num_mm_head_layers

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        states, is_image = hidden_states[..., :-1], hidden_states[..., -1:]
        found = super().forward(states, *args, **options)
        if not self.changes_text:
            found = torch.where(is_image > 0, found, states)
        return torch.cat([found, is_image], -1)


class MarkedNorm(nn.Module):
    """The final norm: float `[R, T, D]` from `[R, T, D + 1]`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.text, self.image = Qwen2RMSNorm(width, eps), Qwen2RMSNorm(width, eps)

    def forward(self, states: Tensor) -> Tensor:
        states, is_image = states[..., :-1], states[..., -1:]
        return torch.where(is_image > 0, self.image(states), self.text(states))


class XOmniConfig(Qwen2Config):
    """Has four numbers more: `mm_vocab_size`, `image_vocab_size`, `num_mm_adap_layers` and `num_mm_head_layers`."""

    model_type = "x-omni"


class XOmniForCausalLM(Qwen2PreTrainedModel):
    """The network with its image head."""

    config_class = XOmniConfig

    def __init__(self, config: XOmniConfig):
        super().__init__(config)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.model = Qwen2Model(config)
        self.model.embed_tokens = MarkedEmbedding(config.vocab_size, config.mm_vocab_size, D)
        self.model.layers = nn.ModuleList(MarkedLayer(config, number) for number in range(config.num_hidden_layers))
        self.model.norm = MarkedNorm(D, eps)
        self.mm_head = nn.Linear(D, config.mm_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> MarkedEmbedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.mm_head
