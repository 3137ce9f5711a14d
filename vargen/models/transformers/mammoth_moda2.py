"""The language model of MammothModa2 (arXiv 2511.18262): Qwen2 with a second feed-forward for image tokens in some layers.

Image tokens also have embeddings and a head of their own. Shape suffixes: R rows, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model, Qwen2PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm

from vargen.models.transformers.marked_states import MarkedEmbedding, join_marks, split_marks


class MammothModa2Layer(Qwen2DecoderLayer):
    """A layer over marked states float `[R, T, D + 1]`. `gen_mlp` is the feed-forward of image tokens; None: `mlp`."""

    def __init__(self, config: Any, number: int):
        super().__init__(config, number)
        self.gen_mlp = Qwen2MLP(config) if config.gen_mlp_start <= number < config.gen_mlp_stop else None

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        states, is_image = split_marks(hidden_states, self.hidden_size)
        states = states + self.self_attn(self.input_layernorm(states), **options)[0]
        normed = self.post_attention_layernorm(states)
        if self.gen_mlp is None:
            found = self.mlp(normed)
        elif is_image is None:
            found = self.gen_mlp(normed)
        else:
            found = torch.where(is_image, self.gen_mlp(normed), self.mlp(normed))
        return join_marks(states + found, is_image)


class MammothModa2Norm(Qwen2RMSNorm):
    """The final norm: float `[R, T, D]` from marked states."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(split_marks(hidden_states, len(self.weight))[0])


class MammothModa2Config(Qwen2Config):
    """Has three numbers more: `gen_vocab_size`, and the layers with a second feed-forward, from `gen_mlp_start` to `_stop`."""

    model_type = "mammothmoda2"


class MammothModa2ForCausalLM(Qwen2PreTrainedModel):
    """The network with its image head."""

    config_class = MammothModa2Config
    base_model_prefix = ""  # official folders have another, which transformers would add to

    def __init__(self, config: MammothModa2Config):
        super().__init__(config)
        D = config.hidden_size
        self.model = Qwen2Model(config)
        self.model.embed_tokens = MarkedEmbedding(config.vocab_size, config.gen_vocab_size, D)
        self.model.layers = nn.ModuleList(MammothModa2Layer(config, number) for number in range(config.num_hidden_layers))
        self.model.norm = MammothModa2Norm(D, config.rms_norm_eps)
        self.gen_head = nn.Linear(D, config.gen_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> MarkedEmbedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.gen_head
