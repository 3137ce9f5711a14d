"""Adapter of a `LlamaGenTransformer` for decoding: CFG rows, caches and positions.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T fed tokens, A path slots, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Output, TokenModel, Tree
from vargen.device import normal_tensors
from vargen.models.condition import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen import LlamaGenOutput, LlamaGenTransformer
from vargen.pipelines.adapters.drafters import LowResolutionDrafter


class LlamaGenTokenModel(TokenModel):
    """`TokenModel` of a LlamaGen transformer.

    Args:
        transformer: the network.
        guidance_scale: scale of classifier-free guidance; 1 runs without the unconditional rows.
        guidance_interval: guide token 0 and decoding steps up to this one, counted from 0 at token 1; None guides all.
        negative: condition of the unconditional rows. Default: the null condition.
        compress_prefix: store the conditioning in one cache slot, which is exact.
        step: callable for the passes after prefill: the transformer or its compiled version.
        codebook: float `[V, C]`, the tokenizer's embeddings, for rules that compare tokens.
        draft_model: a smaller model with the same vocabulary, for speculative decoding.
        draft_heads: by name, functions that make a draft head for this model, from networks trained on its features.
        low_res: a low-resolution model whose images predict drafts.
        example_tokens: integers `[M, N]`, example tokens for lookup drafters.
        device: device of the passes. Default: the device of the weights, which is a different one while they are offloaded.
    """

    def __init__(
        self,
        transformer: LlamaGenTransformer,
        guidance_scale: float = 1.0,
        guidance_interval: int | None = None,
        negative: Condition | None = None,
        compress_prefix: bool = True,
        step: Callable[..., LlamaGenOutput] | None = None,
        codebook: Tensor | None = None,
        draft_model: LlamaGenTokenModel | None = None,
        example_tokens: Tensor | None = None,
        device: torch.device | None = None,
        draft_heads: Mapping[str, Callable[[LlamaGenTokenModel], Any]] | None = None,
        low_res: LowResolutionDrafter | None = None,
    ):
        self.transformer = transformer
        self.step = transformer if step is None else step
        self.guidance_scale, self.guidance_interval = guidance_scale, guidance_interval
        self.negative = negative
        self.compress_prefix = compress_prefix
        self.codebook = codebook
        self.draft_model = draft_model
        self.example_tokens, self.low_res = example_tokens, low_res
        self.rows_per_image = 1 if guidance_scale == 1.0 else 2
        self.device = device or transformer.device
        self.vocab, self.grid = transformer.config.vocab_size, (transformer.config.grid_size, transformer.config.grid_size)
        self.num_layers = len(transformer.layers)
        hooks = ("_hf_hook", "_diffusers_hook")  # set by accelerate and by diffusers
        self._hooked = any(hasattr(module, hook) for module in transformer.modules() for hook in hooks)
        if self._hooked:
            self.capture_blocker = "weights are offloaded, or cast layer by layer, which hooks do in each pass"
        self.draft_heads = {name: make(self) for name, make in (draft_heads or {}).items()}
        # A tensor, because the compiler would build a new graph for every other Python number.
        self._guidance = torch.tensor(guidance_scale, device=self.device) if self.rows_per_image == 2 else None
        self.cost_key = self._make_cost_key()

    def _make_cost_key(self) -> str:
        """Describe what the time of a pass depends on, besides batch and machine: sizes and dtype."""
        config = {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}
        sizes = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
        compiled = ", compiled" if self.step is not self.transformer else ""
        prefix = "" if self.compress_prefix else ", whole prefix"
        dtype = str(self.transformer.dtype).removeprefix("torch.")
        layers = "" if self.num_layers == self.transformer.config.n_layer else f", {self.num_layers} layers"
        network = f"{type(self.transformer).__name__} {sizes}, {dtype}"
        return f"{network}, {self.rows_per_image} rows an image{layers}{compiled}{prefix}"

    def skip_layers(self, layers: Sequence[int]) -> LlamaGenTokenModel:
        """Return the same model without some layers of its transformer, which share the weights.

        Raises:
            ValueError: for unknown layers, or while hooks move the weights, which move all layers or none.
        """
        if self._hooked:
            raise ValueError("layers cannot be skipped while the transformer is offloaded or cast layer by layer")
        view = self.transformer.skipping(layers)
        options = (self.guidance_scale, self.guidance_interval, self.negative, self.compress_prefix)
        return LlamaGenTokenModel(view, *options, codebook=self.codebook, device=self.device)

    def prefill(self, condition: Condition, max_width: int) -> tuple[KVCache, Output]:
        if self.rows_per_image == 2:
            condition = condition.join(self.negative or self.transformer.null_condition(condition))
        rows = condition.class_labels if condition.class_labels is not None else condition.caption_embeds
        assert rows is not None
        cache = self.transformer.new_cache(len(rows), max_width, self.compress_prefix, self.device)
        with self._mode():
            out = self.transformer(condition=condition, cache=cache, guidance=self._guidance)
        return cache, Output(out.logits, out.hidden)

    def forward(self, tokens: Tensor, state: KVCache, tree: Tree) -> Output:
        rows = tokens.repeat(self.rows_per_image, 1)
        guidance = self._guidance_at(state.length[: len(tokens), None] + tree.depth)
        places = {}
        if not tree.is_chain:
            ancestors = tree.ancestor_bits if state.fused else self._for_rows(tree.ancestors, 2)
            places = {"positions": state.length[:, None] + self._for_rows(tree.depth, 1), "ancestors": ancestors}
        with self._mode():
            out = self.step(rows, cache=state, guidance=guidance, **places)
        return Output(out.logits, out.hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of tokens `[B, T]`, an input of trained drafters."""
        with self._mode():
            return self.transformer.tok_embeddings(tokens.repeat(self.rows_per_image, 1))

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Guided logits `[B, T, V]` for the tokens after positions `[B, T]`, from states `[R, T, D]` before the final norm."""
        with self._mode():
            # Not `transformer.dtype`, for which diffusers iterates over all parameters.
            return self.transformer.head(hidden.to(self.transformer.norm.weight.dtype), self._guidance_at(position))

    def _guidance_at(self, position: Tensor) -> Tensor | None:
        """Guidance scale for the tokens after positions `[B, T]`. Position 0 is decoding step 0, which samples token 1."""
        if self._guidance is None or self.guidance_interval is None:
            return self._guidance
        return torch.where(position <= self.guidance_interval, self._guidance, 1.0)[..., None]

    def _mode(self) -> AbstractContextManager[None]:
        """Keep the loop's inference mode, unless hooks replace a layer's weights: these must be normal tensors, which can be
        trained later."""
        return normal_tensors() if self._hooked else nullcontext()

    def _for_rows(self, part: Tensor, dims: int) -> Tensor:
        """Repeat a per-image tensor of a tree for the CFG rows of the network."""
        return part if part.dim() == dims else part.repeat(self.rows_per_image, *[1] * dims)

    def commit(self, state: KVCache, path: Tensor, count: Tensor, tree: Tree) -> None:
        if tree.is_chain:
            state.advance(count.repeat(self.rows_per_image))
        else:
            state.keep(path.repeat(self.rows_per_image, 1), count.repeat(self.rows_per_image))

    def rollback(self, state: KVCache, length: Tensor) -> None:
        state.rollback(length.repeat(self.rows_per_image))
