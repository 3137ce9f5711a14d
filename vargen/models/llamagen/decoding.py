"""A `LlamaGenTransformer` as the token loop sees it: CFG rows, caches and positions.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T fed tokens, A path slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding import Output, Tree
from vargen.kernels.host import is_hooked, normal_tensors
from vargen.models.guidance import Condition, Guidance, GuidedTokenModel, cost_key, to_guidance
from vargen.models.heads.decoding import LowResolutionDrafter
from vargen.models.int8_cache import Int8Cache
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.storage import validate_offloading


class LlamaGenTokenModel(GuidedTokenModel):
    """`TokenModel` of a LlamaGen transformer; arguments that are not listed are as there.

    Args:
        guidance: classifier-free guidance, or its scale.
        compress_prefix: store the conditioning in one cache slot, which is exact, instead of all its rows.
        draft_heads: by name, functions that make a draft head for this model, from networks trained on its features.
        device: of the passes. Default: the device of the weights, which is a different one while they are offloaded.
    """

    low_res: LowResolutionDrafter | None

    def __init__(
        self,
        transformer: LlamaGenTransformer,
        guidance: Guidance | float = 1.0,
        *,
        compress_prefix: bool = True,
        codebook: Tensor | None = None,
        draft_model: LlamaGenTokenModel | None = None,
        device: torch.device | None = None,
        draft_heads: Mapping[str, Callable[[LlamaGenTokenModel], Any]] | None = None,
        low_res: LowResolutionDrafter | None = None,
    ):
        validate_offloading(transformer)
        self.transformer = transformer
        self.guidance = to_guidance(guidance)
        self.compress_prefix = compress_prefix
        self.codebook = codebook
        self.draft_model = draft_model
        self.low_res = low_res
        self.device = device or transformer.device
        self.vocab, self.grid = transformer.config.vocab_size, (transformer.config.grid_size,) * 2
        self.num_layers = len(transformer.layers)
        self._offloaded = any(map(is_hooked, transformer.modules()))
        self.networks = (transformer,)
        self.rows_per_image = self.guidance.rows_per_image
        self.make_heads(draft_heads)
        # A tensor, because the compiler would build a new graph for every other Python number. Of a bound model: [slots, 1, 1].
        scale = torch.tensor(self.guidance.scale, dtype=torch.float32, device=self.device)
        self._scale = scale if self.rows_per_image == 2 else None
        layers = "" if self.num_layers == transformer.config.n_layer else f"{self.num_layers} layers"
        rows = f"{self.rows_per_image} rows an image"
        prefix = "" if compress_prefix else "whole prefix"
        self.cost_key = cost_key(transformer, rows, layers, prefix, transformer.pass_backend)

    def bind(self, slots: int) -> Self:
        bound = super().bind(slots)
        bound.low_res = self.low_res and self.low_res.bind()
        return bound

    def skip_layers(self, layers: Sequence[int]) -> LlamaGenTokenModel:
        """Return the same model without some layers of its transformer, which share the weights."""
        if self._offloaded:
            raise ValueError("layers cannot be skipped while the transformer is offloaded or cast layer by layer")
        view = self.transformer.without_layers(layers)
        options: dict[str, Any] = {"compress_prefix": self.compress_prefix, "codebook": self.codebook, "device": self.device}
        return LlamaGenTokenModel(view, self.guidance, **options)

    def allocate(self, condition: Condition, width: int, slots: int | None = None) -> KVCache | Int8Cache:
        rows = (len(condition) if slots is None else slots) * self.rows_per_image
        return self.transformer.new_cache(rows, width, self.compress_prefix, self.device)

    def prefill(self, condition: Condition, state: KVCache | Int8Cache, rows: Tensor | None = None) -> Output:
        scale = self._scale
        if scale is not None and scale.dim():
            scale = self.guidance.start_scales(scale, rows, condition.scale)
        condition = reduce(Condition.cat, self.guidance.conditions(condition, self.transformer))
        new: Any = state.prefix_only(len(condition))
        with self._tensor_mode():
            out = self.transformer(condition=condition, cache=new, guidance=scale)
        state.start_rows(new, self.guidance.rows_of(rows, state.rows, self.device))
        return Output(out.logits, out.hidden_states)

    def run_pass(self, tokens: Tensor, state: KVCache | Int8Cache, tree: Tree) -> Output:
        rows = tokens if isinstance(state, Int8Cache) else self.guidance.repeat(tokens)
        scale, places = self._scale, {}
        if self.guidance.interval is not None:
            scale = self._scale_at(state.length[: len(tokens), None] + tree.depth)
        if not tree.is_chain:
            ancestors = tree.ancestor_bits if state.fused else self.repeat_rows(tree.ancestors, 2)
            places = {"positions": state.length[:, None] + self.repeat_rows(tree.depth, 1), "ancestors": ancestors}
        with self._tensor_mode():
            out = self.transformer(rows, cache=state, guidance=scale, **places)
        return Output(out.logits, out.hidden_states)

    def embed(self, tokens: Tensor) -> Tensor:
        with self._tensor_mode():
            return self.transformer.tok_embeddings(self.guidance.repeat(tokens))

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        with self._tensor_mode():
            # Not `transformer.dtype`, for which diffusers iterates over all parameters.
            return self.transformer.head(hidden.to(self.transformer.norm.weight.dtype), self._scale_at(position))

    def _scale_at(self, position: Tensor) -> Tensor | None:
        """Guidance scale for the tokens after positions `[B, T]`. Position 0 is decoding step 0, which samples token 1."""
        if self._scale is None or self.guidance.interval is None:
            return self._scale
        return torch.where((position <= self.guidance.interval)[..., None], self._scale, 1.0)

    def _tensor_mode(self) -> AbstractContextManager[None]:
        """Keep the loop's inference mode, unless hooks replace weights: by normal tensors, which can be trained later."""
        return normal_tensors() if self._offloaded else nullcontext()
