"""The language model of X-Omni (arXiv 2507.22058): Qwen2 whose first and last layers change image tokens alone.

Text and image tokens have embeddings and final norms of their own. Shape suffixes: R rows, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from vargen.models.transformers.marked_states import MarkedEmbedding, join_marks, split_marks


class XOmniLayer(Qwen2DecoderLayer):
    """A layer over marked states float `[R, T, D + 1]`, which leaves those of text as they are if it is one of image tokens."""

    def __init__(self, config: Any, number: int):
        super().__init__(config, number)
        self.changes_text = config.num_mm_adap_layers <= number < config.num_hidden_layers - config.num_mm_head_layers

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        states, is_image = split_marks(hidden_states, self.hidden_size)
        found = super().forward(states, *args, **options)
        if is_image is not None and not self.changes_text:
            found = torch.where(is_image, found, states)
        return join_marks(found, is_image)


class XOmniNorm(nn.Module):
    """The final norm: float `[R, T, D]` from marked states."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.text, self.image = Qwen2RMSNorm(width, eps), Qwen2RMSNorm(width, eps)

    def forward(self, states: Tensor) -> Tensor:
        states, is_image = split_marks(states, len(self.text.weight))
        found = self.image(states)
        return found if is_image is None else torch.where(is_image, found, self.text(states))


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
        self.model.layers = nn.ModuleList(XOmniLayer(config, number) for number in range(config.num_hidden_layers))
        self.model.norm = XOmniNorm(D, eps)
        self.mm_head = nn.Linear(D, config.mm_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> MarkedEmbedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.mm_head
