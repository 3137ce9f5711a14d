"""Text encoders: MiniLM as a diffusers component, whose weights are stored as int8 with row scales, and T5."""

from __future__ import annotations

from typing import ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor

from vargen.folders.transformers_networks import NetworkKind

# DiffusionPipeline looks for the name `ModelMixin` in this very module to learn how to load the component.
from vargen.models.storage import QuantizedStorageMixin, validate_weight_format

# Text encoders of transformers by the name of their class. A folder may hold the decoder of the whole model, too.
TEXT_ENCODERS = {
    name: NetworkKind(name, model_type, ignored=(r"^decoder\.", r"^lm_head\."), layers={"num_layers": ("encoder.block.",)})
    for name, model_type in (("T5EncoderModel", "t5"), ("UMT5EncoderModel", "umt5"))
}

_UNQUANTIZED = ("position_embeddings.weight", "token_type_embeddings.weight")


class MiniLMTextEncoder(QuantizedStorageMixin, ConfigMixin):
    """BERT encoder that gives one feature vector per token (no pooling).

    Saves and loads like any diffusers model. With ``weight_format="int8"`` the weight file holds the matrices
    as int8 with a float32 ``<name>.scale`` each ([rows, groups]: one group for word embeddings, one per 32
    columns for linear layers), position and segment embeddings as float16 and vectors as float32; otherwise
    everything is float16 or float32.

    Args:
        vocab_size: number of tokens.
        hidden_size: feature width, 384 for MiniLM-L6; a multiple of ``num_attention_heads``.
        num_hidden_layers: number of transformer layers.
        num_attention_heads: attention heads per layer.
        intermediate_size: width of the feed-forward layers.
        max_position_embeddings: longest accepted sequence.
        type_vocab_size: number of segment embeddings.
        layer_norm_eps: epsilon of the layer norms.
        weight_format: how `save_pretrained` stores the weights: "int8", "float16" or "float32".
    """

    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"num_hidden_layers": ("bert.encoder.layer.",)}

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 384,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 12,
        intermediate_size: int = 1536,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        layer_norm_eps: float = 1e-12,
        weight_format: str = "int8",
    ) -> None:
        super().__init__()
        validate_weight_format(weight_format)
        # Imported late, because importing transformers takes seconds.
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=max_position_embeddings,
            type_vocab_size=type_vocab_size,
            layer_norm_eps=layer_norm_eps,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode token ids.

        Args:
            input_ids: int64 [B, T] with T up to ``max_position_embeddings``.
            attention_mask: [B, T], 1 for tokens and 0 for padding; default all ones.

        Returns:
            float32 [B, T, hidden_size]; rows at padding are meaningless.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids must be [B, T] with T <= {self.config.max_position_embeddings}, got {list(input_ids.shape)}"
            )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit input_ids {list(input_ids.shape)}")
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()

    def num_scale_groups(self, name: str, weight: Tensor) -> int | None:
        # A row of the word embeddings affects only one token. Linear layers, and position and segment embeddings, affect all
        # tokens, so they have finer scales or none.
        if weight.ndim != 2 or name.endswith(_UNQUANTIZED):
            return None
        columns = weight.shape[1]
        return 1 if "word_embeddings" in name or columns % 32 else columns // 32

    def unquantized_dtype(self, name: str) -> torch.dtype:
        return torch.float16 if name.endswith(_UNQUANTIZED) else torch.float32
