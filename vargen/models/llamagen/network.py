"""LlamaGen: a Llama-like transformer over raster-ordered image tokens.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation" (arXiv:2406.06525).
Parameter names are the official ones, so an official state dict loads strictly.

Shape suffixes: B rows (images; twice as many under guidance), P conditioning rows, N image tokens of the grid, T tokens of
one pass, S cache slots, D width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Literal, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.host import normal_tensors
from vargen.kernels.int8.load import TOKEN_PASS, CompiledCode
from vargen.models.guidance import Condition, apply_guidance, validate_skipped
from vargen.models.int8_cache import Int8Cache
from vargen.models.kv_cache import KVCache, PrefixView
from vargen.models.llamagen import int8
from vargen.models.llamagen.blocks import (
    CaptionEmbedder,
    GridNetwork,
    LabelEmbedder,
    Linear,
    LlamaGenBlock,
    RMSNorm,
    rotary_factors,
)
from vargen.models.quantization import replace_linear_layers
from vargen.models.storage import ModelMixin, read_weight  # noqa: F401

# Official model sizes.
SIZES: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "n_layer": 12, "n_head": 12},
    "L": {"dim": 1024, "n_layer": 24, "n_head": 16},
    "XL": {"dim": 1280, "n_layer": 36, "n_head": 20},
    "XXL": {"dim": 1536, "n_layer": 48, "n_head": 24},
    "3B": {"dim": 3200, "n_layer": 24, "n_head": 32},
}


class LlamaGenOutput(NamedTuple):
    """Logits float32 `[B, T, V]`, and last hidden states `[B, T, D]` after (`features`) and before the final norm."""

    logits: Tensor
    features: Tensor
    hidden_states: Tensor


class LlamaGenTransformer(GridNetwork, ConfigMixin):
    """The next-token image transformer of LlamaGen.

    Args:
        condition: `"class"`, `"text"`, or `"features"`: rows that attend to each other, and learned positions instead of rotary
            ones, as of Tar's detokenizer AR-DTok (arXiv 2506.18898).
        dim, n_layer, n_head, n_kv_head: width, layers, heads; the head width `dim / n_head` must be divisible by 4.
        vocab_size: number of image tokens V.
        grid_size: side of the square token grid, at most 256; N = grid_size^2. The rotary table is specific to the grid.
        num_classes: without the null class (`condition="class"`).
        caption_dim, cls_token_num: width and number of caption rows (not of `condition="class"`).
        multiple_of, ffn_dim_multiplier: the feed-forward width is 8/3 dim times the multiplier, rounded up to `multiple_of`.
    """

    partly_read_parameters = ("tok_embeddings.", "cls_embedding.", "abs_pe")  # of which a pass reads a few rows, or nothing
    _no_split_modules: ClassVar[list[str]] = ["LlamaGenBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"n_layer": ("layers.",)}
    _repeated_blocks: ClassVar[list[str]] = ["LlamaGenBlock"]
    compiled_code: ClassVar[CompiledCode | None] = TOKEN_PASS
    _skip_layerwise_casting_patterns: ClassVar[list[str]] = ["norm", "tok_embeddings", "cls_embedding"]

    @register_to_config
    def __init__(
        self,
        condition: Literal["class", "text", "features"] = "class",
        dim: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        n_kv_head: int | None = None,
        vocab_size: int = 16384,
        grid_size: int = 16,
        num_classes: int = 1000,
        caption_dim: int = 2048,
        cls_token_num: int = 120,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        rope_base: float = 10000.0,
        dropout: float = 0.0,
        weight_format: str | None = None,
        quantization: str | None = None,
    ):
        super().__init__()
        self.cls_embedding: nn.Module
        self.abs_pe: nn.Parameter | None = None  # learned positions [P + N - 1, D]
        if condition == "class":
            self.cls_embedding = LabelEmbedder(num_classes, dim)
        elif condition == "text":
            self.cls_embedding = CaptionEmbedder(caption_dim, dim, cls_token_num)
        elif condition == "features":
            if quantization is not None:
                raise ValueError(f"quantization must be None: 8-bit passes have rotary positions, got {quantization!r}")
            self.cls_embedding = nn.Linear(caption_dim, dim)
            self.abs_pe = nn.Parameter(torch.empty(cls_token_num + self.tokens - 1, dim))
            self.rotary = torch.tensor([1.0, 0.0]).expand_as(self.rotary).clone()  # no rotation
        else:
            raise ValueError(f"condition must be 'class', 'text' or 'features', got {condition!r}")
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        shape = dim, n_head, n_kv_head or n_head, self.ffn_width
        self.layers = nn.ModuleList(LlamaGenBlock(*shape, norm_eps, dropout) for _ in range(n_layer))
        self.norm = RMSNorm(dim, norm_eps)
        self.output = Linear(dim, vocab_size)
        self.embedding_dropout = nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.zeros_(parameter) if name == "output.weight" else nn.init.normal_(parameter, std=0.02)
        if quantization is not None:
            replace_linear_layers(self)

    @property
    def num_prefix_rows(self) -> int:
        """Number of conditioning rows P."""
        return 1 if self.config.condition == "class" else self.config.cls_token_num

    def null_condition(self, condition: Condition) -> Condition:
        """Return the unconditional condition for guidance: the null class, the null caption with the *same* mask, or zeros."""
        if condition.class_labels is not None:
            return Condition(class_labels=torch.full_like(condition.class_labels, self.config.num_classes))
        given = condition.require(self.config.condition)
        if self.abs_pe is not None:
            return Condition(caption_embeds=torch.zeros_like(given), caption_mask=condition.caption_mask)
        B, P, _ = given.shape  # if P is below the model's, the null caption is cut on the left
        null = read_weight(self.cls_embedding, "uncond_embedding")[-P:].expand(B, -1, -1)
        return Condition(caption_embeds=null.to(given), caption_mask=condition.caption_mask)

    def new_cache(
        self, rows: int, scratch: int = 1, compress_prefix: bool = True, device: torch.device | None = None
    ) -> KVCache | Int8Cache:
        """Create a cache for `rows` rows and passes of at most `scratch` tokens; see `LlamaGenTokenModel` for the others."""
        config = self.config
        shape = len(self.layers), rows, config.n_kv_head or config.n_head, config.dim // config.n_head
        compressed = compress_prefix and self.abs_pe is None
        slots = {"prefix": 1 if compressed else self.num_prefix_rows, "tokens": self.tokens, "scratch": scratch}
        with normal_tensors():  # writable in and outside of inference mode
            if self.quantized:
                return int8.Int8Cache(*shape, **slots, compiled=TOKEN_PASS.load())
            return KVCache(*shape, **slots, dtype=self.dtype, device=device or self.device)

    def without_layers(self, layers: Sequence[int]) -> LlamaGenTransformer:
        """Return a view of this network without some of its layers, which shares all weights and the config."""
        validate_skipped(layers, len(self.layers))
        kept = [block for layer, block in enumerate(self.layers) if layer not in layers]
        view = copy(self)
        view._modules = {**self._modules, "layers": nn.ModuleList(kept)}
        return view

    def forward(
        self,
        tokens: Tensor | None = None,
        condition: Condition | None = None,
        cache: KVCache | Int8Cache | None = None,
        positions: Tensor | None = None,
        ancestors: Tensor | None = None,
        guidance: float | Tensor | None = None,
    ) -> LlamaGenOutput:
        """Run one pass in one of three forms.

        Teacher forcing (`tokens [B, N]`, `condition`): returns logits `[B, N, V]`; row i predicts token i from earlier ones.
        Prefill (`condition`, `cache`): stores the condition, and returns logits `[B, 1, V]` of token 0.
        Step (`tokens [B, T]`, `cache`): feeds T tokens after each row's pointer, and returns logits `[B, T, V]` of the token
        after each. It does not advance the pointer: call `cache.commit_chain` or `cache.commit_path` for the tokens to keep.

        Args:
            positions, ancestors: of a tree; see `run_layers`. Default: a chain.
            guidance: scale s of classifier-free guidance, a number, `[]` or `[B/2, T, 1]`. The last B/2 rows are the
                unconditional ones, and logits `[B/2, T, V]` are u + s (c - u) (Ho & Salimans 2022). Default: no guidance, and
                logits of all rows.
        """
        if isinstance(cache, Int8Cache) and condition is None and tokens is not None:
            if cache.scratch < tokens.shape[1]:
                raise ValueError(f"the cache was made for at most {cache.scratch} tokens a pass, got {tokens.shape[1]}")
            logits, features, x = int8.run_step(self, tokens, cache, positions, ancestors, guidance)
        else:
            if condition is not None and tokens is not None and cache is None:
                x = self._teacher_forced(tokens, condition)
            elif condition is not None and tokens is None and cache is not None:
                x = self._prefill(condition, cache)
            elif condition is None and tokens is not None and isinstance(cache, KVCache):
                x = self.run_layers(self.layers, self._embed_tokens(tokens, cache, positions), cache, positions, ancestors)
            else:
                raise ValueError("pass (tokens, condition), (condition, cache) or (tokens, cache)")
            features = self._final_norm(x)
            logits = self._logits(features, guidance)
        return LlamaGenOutput(logits, features, x)

    def head(self, hidden: Tensor, guidance: float | Tensor | None = None) -> Tensor:
        """Compute logits from last hidden states `[B, T, D]` before the final norm; `guidance` as in `forward`."""
        return self._logits(self._final_norm(hidden), guidance)

    def _final_norm(self, x: Tensor) -> Tensor:
        return int8.final_norm(self, x) if self.quantized else self.norm(x)

    def _logits(self, features: Tensor, guidance: float | Tensor | None) -> Tensor:
        if self.quantized:
            return int8.compute_logits(self, features, guidance)
        if guidance is not None:  # of features: the output layer is linear, so it can run on half of the rows
            high = features.to(torch.promote_types(features.dtype, torch.float32))
            features = apply_guidance(*high.chunk(2), guidance).type_as(features)
        return self.output(features).float()

    def forward_features(self, tokens_BN: Tensor, condition: Condition) -> Tensor:
        """Run teacher forcing without the head; returns features `[B, N, D]` after the final norm."""
        return self._final_norm(self._teacher_forced(tokens_BN, condition))

    def _embed(self, condition: Condition) -> Tensor:
        given = condition.require(self.config.condition)
        if self.abs_pe is not None:
            return self.cls_embedding(given.to(self.abs_pe.dtype)) + self.abs_pe[: given.shape[1]]
        return int8.embed_condition(self, condition) if self.quantized else self.cls_embedding(given).to(self.dtype)

    def _embed_tokens(self, tokens: Tensor, cache: KVCache, positions: Tensor | None) -> Tensor:
        """Return the inputs of a pass; `positions` as of `run_layers`."""
        x = self.tok_embeddings(tokens)
        if self.abs_pe is None:
            return x
        cells = cache.positions(tokens.shape[1]) if positions is None else positions
        return x + self.abs_pe[(self.num_prefix_rows + cells).clamp(max=len(self.abs_pe) - 1)]

    def _teacher_forced(self, tokens_BN: Tensor, condition: Condition) -> Tensor:
        prefix = self._embed(condition)
        B, P, _ = prefix.shape
        embedded = self.tok_embeddings(tokens_BN[:, :-1])
        if self.abs_pe is not None:
            embedded = embedded + self.abs_pe[P : P + embedded.shape[1]]
        x = self.embedding_dropout(torch.cat([prefix, embedded], dim=1))
        T = x.shape[1]
        # Zero rotary factors make queries and keys of conditioning rows exactly zero.
        cos_sin = torch.cat([self.rotary.new_zeros(P, *self.rotary.shape[1:]), self.rotary[: T - P]])
        if self.abs_pe is not None:
            cos_sin = self.rotary[:1]
        visible = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if condition.caption_mask is not None:
            visible = visible.expand(B, T, T).clone()
            visible[:, :, :P] &= condition.caption_mask.bool()[:, None]
            visible |= torch.eye(T, dtype=torch.bool, device=x.device)  # padding attends only to itself
            visible = visible[:, None]
        if self.quantized:
            return int8.forward_sequence(self, x, cos_sin, visible)[:, P - 1 :]
        rotary = rotary_factors(cos_sin)
        for layer in self.layers:
            x = layer(x, rotary, visible)
        return x[:, P - 1 :]

    def _prefill(self, condition: Condition, cache: KVCache | Int8Cache) -> Tensor:
        """Run the conditioning rows; without a score matrix, unless they attend to each other.

        Their attention scores are all zero, so the output of a row is the running mean of values. For later tokens, n visible
        rows are equivalent to one slot of key zero, value mean(v) and score log(n)."""
        if isinstance(cache, Int8Cache):
            return int8.run_prefill(self, self._embed(condition), condition.caption_mask, cache)
        self.choose_layout(cache.k)
        x = self._embed(condition)
        B, P, _ = x.shape
        mask = condition.caption_mask
        if self.abs_pe is not None:
            causal, rotary = torch.ones(P, P, dtype=torch.bool, device=x.device).tril(), rotary_factors(self.rotary[:1])
            for i, layer in enumerate(self.layers):
                x = layer(x, rotary, causal, PrefixView(cache, i))
            return x[:, -1:]
        visible = torch.ones(B, P, dtype=torch.float32, device=x.device) if mask is None else mask.float()
        seen = visible.cumsum(1)  # number of visible rows up to each row, [B, P]
        total = seen[:, -1:]
        compressed = cache.prefix == 1
        cache.set_prefix_bias(total.log() if compressed else visible.log())
        for i, layer in enumerate(self.layers):
            attention = layer.attention
            v = attention.values(layer.attention_norm(x))  # [B, P, H, K]
            weighted = v.float() * visible[:, :, None, None]
            # A padding row also attends to itself, but no other row attends to it.
            running = (weighted.cumsum(1) + v.float() - weighted) / (seen + 1 - visible)[:, :, None, None]
            running = running.type_as(v)
            mean = (weighted.sum(1, keepdim=True) / total.clamp_min(1)[:, :, None, None]).type_as(v)
            cache.write_prefix(i, None, mean if compressed else v)
            if attention.n_kv_head != attention.n_head:
                running = running.repeat_interleave(attention.n_head // attention.n_kv_head, dim=2)
            x = layer.add_residuals(x, attention.wo(running.flatten(2)))
        return x[:, -1:]
