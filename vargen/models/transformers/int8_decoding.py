"""Language models of transformers with 8-bit layers, as the token loop sees them. See `vargen.models.transformers.int8`.

Shape suffixes: B images, R rows (B, times two with guidance: conditional rows first), P prompt tokens, T fed tokens, D feature
width, V tokens of the image vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding import Output, Tree
from vargen.kernels.int8.arithmetic import exact_erf_gelu
from vargen.models.guidance import Guidance, validate_skipped
from vargen.models.transformers.base import ImageLanguageModel, PromptRows
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.int8 import Int8Network, Int8Product

_CHUNK = 32  # prompt tokens of a pass


class Int8Parts:
    """What a language model computes in 8 bits: its layers, and the image head; embeddings that are no lookup are a table.

    Args:
        language_model: describes the model.
        network: its layers.
    """

    def __init__(self, language_model: ImageLanguageModel, network: Int8Network):
        self.network, compiled = network, network.compiled
        self.head = [Int8Product(weight, bias, compiled) for weight, bias in language_model.head_layers()]
        self.embedding: Tensor | None = None
        if type(language_model).embed is not ImageLanguageModel.embed:  # products, whose rows would depend on their number
            with torch.no_grad():
                rows = torch.arange(language_model.vocab).split(1024)
                self.embedding = torch.cat([language_model.embed(part[None])[0].detach() for part in rows])

    def run_head(self, features: Tensor) -> Tensor:
        """Logits float32 `[..., V]` of features after the final norm."""
        out = self.head[0](features)
        for product in self.head[1:]:
            out = product(exact_erf_gelu(out))
        return out


class Int8TokenModel(TransformersTokenModel):
    """`TransformersTokenModel` with 8-bit layers; the ones of the described network are not run."""

    def __init__(
        self,
        language_model: ImageLanguageModel,
        parts: Int8Parts,
        guidance: Guidance | float = 1.0,
        draft_model: TransformersTokenModel | None = None,
        *,
        draft_heads: Mapping[str, Callable[[TransformersTokenModel], Any]] | None = None,
    ):
        super().__init__(language_model, guidance, draft_model)
        self.parts, self._network = parts, parts.network
        self._image_head, self._norm = parts.run_head, self._network.final_norm
        self.dtype, self.num_layers = torch.float32, len(self._network.layers)
        form = "operators" if self._network.compiled is None else "compiled"
        self.cost_key = f"{self.cost_key}, {self.num_layers} layers, int8 {form}"
        self.make_heads(draft_heads)

    def skip_layers(self, layers: Sequence[int]) -> Int8TokenModel:
        validate_skipped(layers, self.num_layers)
        parts = copy(self.parts)
        parts.network = self._network.select([each for each in range(self.num_layers) if each not in layers])
        return Int8TokenModel(self.description, parts, self.guidance)

    def allocate(self, condition: PromptRows, width: int, slots: int | None = None) -> Any:
        ids, (rows, columns) = self._join(condition).ids, self.grid
        R = len(ids) if slots is None else slots * self.rows_per_image
        return self._network.allocate(R, prefix=ids.shape[1], tokens=rows * columns, scratch=width)

    def prefill(self, condition: PromptRows, state: Any, rows: Tensor | None = None) -> Output:
        joined = self._join(condition)
        R, P = joined.ids.shape
        if state.prefix < P:
            raise ValueError(f"condition must have at most {state.prefix} rows, for which there is room, got {P}")
        valid = pad(joined.valid, (state.prefix - P, 0))
        cache = self._network.allocate(R, prefix=state.prefix, tokens=0, scratch=0)
        cache.prefix_bias.masked_fill_(~valid, float("-inf"))
        positions = (joined.valid.long().cumsum(1) - 1).clamp(min=0)
        embedded = self.description.model.get_input_embeddings()(joined.ids).float()
        for first in range(0, P, _CHUNK):
            part, place = slice(first, first + _CHUNK), state.prefix - P + first
            given = self.description.prompt_positions(positions[:, part])
            hidden, features = self._network.run(embedded[:, part], cache, given, joined.valid[:, part], None, place)
        started = self.guidance.rows_of(rows, state.rows, self.device)
        state.start_rows(cache, started)
        state.start.index_copy_(0, started, valid.sum(1))
        scale = self._scale
        if isinstance(scale, Tensor):
            scale = self.guidance.start_scales(scale, rows, condition.scale)
        first_position = torch.zeros(R // self.rows_per_image, 1, dtype=torch.int64)
        return Output(self._logits(features[:, -1:], first_position, scale), hidden[:, -1:])

    def run_pass(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        ancestors = None if tree.is_chain else self.repeat_rows(tree.ancestors, 2)
        index = state.length[:, None] + self.repeat_rows(tree.depth, 1)
        positions = self.description.positions(state.start, index)
        hidden, features = self._network.run(self.embed(tokens), state, positions, None, ancestors, state.prefix)
        return Output(self._logits(features, index[: len(tokens)] + 1, self._scale), hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        tokens, table = self.guidance.repeat(tokens), self.parts.embedding
        return (self.description.embed(tokens) if table is None else table[tokens]).float()
