"""Text encoders: MiniLM as a diffusers component, whose weights are stored as int8 with row scales, and T5; and a small
image-text model over MiniLM's features.

Shape suffixes: B images, C channels, Y/X pixel rows and columns, D pooled width, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.folders.transformers_networks import NetworkKind

# DiffusionPipeline looks for the name `ModelMixin` in this very module to learn how to load the component.
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401

# Text encoders of transformers by the name of their class. A folder may hold the decoder of the whole model, too.
TEXT_ENCODERS = {
    name: NetworkKind(name, model_type, ignored=(r"^decoder\.", r"^lm_head\."), layers={"num_layers": ("encoder.block.",)})
    for name, model_type in (("T5EncoderModel", "t5"), ("UMT5EncoderModel", "umt5"))
}

PATCH = 4  # side of the pixel patches that the first layer folds into channels
_UNQUANTIZED = ("position_embeddings.weight", "token_type_embeddings.weight")


class MiniLMTextEncoder(QuantizedStorageMixin, ConfigMixin):
    """BERT encoder that gives one feature vector per token (no pooling), with arguments as in `BertConfig`.

    With ``weight_format="int8"`` the weight file holds matrices as int8 with a float32 ``<name>.scale`` [rows, groups] each,
    of one group for word embeddings and one per 32 columns for linear layers, position and segment embeddings as float16, and
    vectors as float32.
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
        # Imported late, because importing transformers takes seconds.
        from transformers import BertConfig, BertModel

        settings = {name: value for name, value in self.config.items() if not name.startswith("_")}
        del settings["weight_format"]
        self.bert = BertModel(BertConfig(**settings), add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Encode token ids to features float32 [B, T, hidden_size]; those of padding are meaningless.

        Args:
            input_ids: int64 [B, T] with T up to ``max_position_embeddings``.
            attention_mask: [B, T], 1 for tokens and 0 for padding; default all ones.
        """
        most = self.config.max_position_embeddings
        if input_ids.ndim != 2 or input_ids.shape[1] > most:
            raise ValueError(f"input_ids must be [B, T] with T <= {most}, got {list(input_ids.shape)}")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask {list(attention_mask.shape)} does not fit input_ids {list(input_ids.shape)}")
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()

    def num_scale_groups(self, name: str, weight: Tensor) -> int | None:
        """See `QuantizedStorageMixin`.

        A row of the word embeddings affects only one token. Linear layers, and position and segment embeddings, affect all
        tokens, so they have finer scales or none.
        """
        if weight.ndim != 2 or name.endswith(_UNQUANTIZED):
            return None
        columns = weight.shape[1]
        return 1 if "word_embeddings" in name or columns % 32 else columns // 32

    def unquantized_dtype(self, name: str) -> torch.dtype:
        return torch.float16 if name.endswith(_UNQUANTIZED) else torch.float32


class ImageTowerBlock(nn.Module):
    """Residual block: norm, GELU and 3x3 convolution, twice."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)  # initialized as the identity

    def forward(self, x_BCYX: Tensor) -> Tensor:
        h = self.conv1(F.gelu(self.norm1(x_BCYX)))
        return x_BCYX + self.conv2(F.gelu(self.norm2(h)))


class ImageTextModel(QuantizedStorageMixin, ConfigMixin):
    """Maps images and captions to unit vectors in a common embedding space, to score how well they match.

    It is trained contrastively, as CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023). The image tower is convolutional,
    which learns more from few images than a transformer. The text tower is a linear map of mean-pooled features of a sentence
    encoder that is not part of the model, so features of captions can be computed once.

    Args:
        widths: channels per stage; each stage halves the resolution of the one before.
        blocks: residual blocks per stage.
        text_dim: width of the pooled text features.
        embed_dim: dimension E of the common space.
        image_size: width and height in pixels at which images are scored; any multiple of 16 works.
        groups: number of groups of the group norms; must divide every width.
    """

    @register_to_config
    def __init__(
        self,
        widths: Sequence[int] = (96, 160, 288),
        blocks: Sequence[int] = (2, 2, 1),
        text_dim: int = 384,
        embed_dim: int = 384,
        image_size: int = 96,
        groups: int = 16,
        weight_format: str | None = None,
    ):
        super().__init__()
        stages: list[nn.Module] = [nn.PixelUnshuffle(PATCH), nn.Conv2d(3 * PATCH**2, widths[0], 3, padding=1)]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            if stage:
                stages.append(nn.Conv2d(widths[stage - 1], width, 3, stride=2, padding=1))
            stages.append(nn.Sequential(*(ImageTowerBlock(width, groups) for _ in range(count))))
        self.stages = nn.Sequential(*stages)
        self.norm_out = nn.GroupNorm(groups, widths[-1])
        self.image_projection = nn.Linear(widths[-1], embed_dim)
        self.text_projection = nn.Linear(text_dim, embed_dim)
        self.concept_scale = nn.Parameter(torch.tensor(14.0).log())  # scale of the softmax over concepts
        self.pair_scale = nn.Parameter(torch.tensor(10.0).log())  # scale of the sigmoid over pairs, initialized as in SigLIP
        self.pair_bias = nn.Parameter(torch.tensor(-10.0))

    def pool_features(self, pixels_BCYX: Tensor) -> Tensor:
        """Compute features `[B, D]` of float images `[B, 3, Y, X]` in [-1, 1], where Y and X are multiples of 16."""
        return F.gelu(self.norm_out(self.stages(pixels_BCYX))).mean((2, 3))

    def encode_image(self, pixels_BCYX: Tensor) -> Tensor:
        """Embed images as unit vectors, float32 `[B, E]`."""
        return F.normalize(self.image_projection(self.pool_features(pixels_BCYX)).float(), dim=-1)

    def encode_text(self, features_BD: Tensor) -> Tensor:
        """Embed mean-pooled unit text features `[B, text_dim]` as unit vectors, float32 `[B, E]`."""
        return F.normalize(self.text_projection(features_BD).float(), dim=-1)
