"""Infinity's transformer: all bits of a scale in one pass, given the sum of the scales before it and a text.

Source: Han et al. 2024, "Infinity: Scaling Bitwise AutoRegressive Modeling for High-Resolution Image Synthesis"
(arXiv:2412.04431). Parameter names are the official ones, with the blocks of all chunks in one list `blocks`.

Attention, feed-forward, shared modulation and cache are VAR's code; see `vargen.models.infinity.blocks`.

Shape suffixes: R rows (images; twice as many under guidance), P text rows, L image tokens of all scales, T tokens of one pass,
D width, E width of the text features, C bits of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.models.guidance import Condition
from vargen.models.infinity.blocks import InfinityBlock, InfinityCache, TextPool
from vargen.models.infinity.schedules import MOST_SCALES, ScalePlan
from vargen.models.llamagen.blocks import rotary_factors
from vargen.models.storage import ModelMixin, QuantizedStorageMixin, read_weight  # noqa: F401
from vargen.models.var.blocks import Modulation, make_caption_mlp, make_modulation, modulate
from vargen.models.var.network import VAROutput, find_last_scale

_NORM_EPS = 1e-6
_LEVELS = 15  # rows of the table of levels, more than there are scales

# Sizes by their official names: depth, width, heads, bits of a token. Those of names with "layer" have no published weights.
SIZES: dict[str, dict[str, Any]] = {
    name: {"depth": depth, "dim": dim, "n_head": heads, "code_dim": bits}
    for name, depth, dim, heads, bits in (
        ("infinity-2b", 32, 2048, 16, 32),
        ("infinity-8b", 40, 3584, 28, 56),
        ("infinity-layer12", 12, 768, 8, 32),
        ("infinity-layer16", 16, 1152, 12, 32),
        ("infinity-layer24", 24, 1536, 16, 32),
        ("infinity-layer32", 32, 2080, 20, 32),
        ("infinity-layer40", 40, 2688, 24, 32),
        ("infinity-layer48", 48, 3360, 28, 32),
    )
}


@dataclass(frozen=True)
class PassGuidance:
    """Classifier-free guidance of a pass whose first half of the rows is conditional: u + cfg (c - u).

    Attributes:
        strength: cfg - 1 of each fed token, float32 `[T]`.
        blocks: indices of blocks whose outputs are guided; both halves go on with the result, but for tokens of strength 0.
        at_logits: whether logits are guided; otherwise they are those of the conditional rows.
    """

    strength: Tensor
    blocks: tuple[int, ...] = ()
    at_logits: bool = True

    def apply(self, x: Tensor) -> Tensor:
        """Guide states `[R, n, D]` of the last n tokens; `[R/2, n, D]`."""
        conditional, unconditional = x.float().chunk(2)
        return torch.lerp(unconditional, conditional, 1 + self.strength[-x.shape[1] :, None])


class InfinityTransformer(QuantizedStorageMixin, ConfigMixin):
    """The next-scale transformer over bits, conditioned on a text.

    Args:
        depth, dim, n_head: blocks, width D, heads.
        code_dim: bits C of a token.
        caption_dim, caption_rows: width E, and maximum number, of the features of a text.
        num_scales: number of scales of the images that it usually generates, of the official ones; see `NUM_SCALES`.
    """

    partly_read_parameters = ("ada_lin", "ada_gss", "text_", "cfg_uncond", "pos_start", "lvl_embed")
    _no_split_modules: ClassVar[list[str]] = ["InfinityBlock"]
    _repeated_blocks: ClassVar[list[str]] = ["InfinityBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"depth": ("blocks.",)}
    _skip_layerwise_casting_patterns: ClassVar[list[str]] = ["norm", "embed", "head_nm", "pos_", "ada_", "cfg_uncond"]

    @register_to_config
    def __init__(
        self,
        depth: int = 32,
        dim: int = 2048,
        n_head: int = 16,
        code_dim: int = 32,
        caption_dim: int = 2048,
        caption_rows: int = 512,
        num_scales: int = MOST_SCALES,
        weight_format: str | None = None,
    ):
        super().__init__()
        if dim % n_head or (dim // n_head) % 4:
            raise ValueError(f"dim / n_head must be a whole number divisible by 4 (two rotary axes), got {dim} / {n_head}")
        if not 1 <= num_scales <= MOST_SCALES:
            raise ValueError(f"num_scales must be from 1 to {MOST_SCALES}, got {num_scales}")
        self.n_head, self.head_dim = n_head, dim // n_head
        hidden = feed_forward_width(dim)
        self.cfg_uncond = nn.Parameter(torch.zeros(caption_rows, caption_dim))
        self.pos_start = nn.Parameter(torch.zeros(1, 1, dim))
        self.text_norm = nn.Module()
        self.text_norm.weight = nn.Parameter(torch.ones(caption_dim))
        self.text_proj_for_sos = nn.ModuleDict({"ca": TextPool(caption_dim, dim)})
        self.text_proj_for_ca = make_caption_mlp(caption_dim, dim)
        self.lvl_embed = nn.Embedding(_LEVELS, dim)
        self.word_embed = nn.Linear(code_dim, dim)
        self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(InfinityBlock(dim, n_head, hidden) for _ in range(depth))
        self.head_nm = nn.ModuleDict({"ada_lin": nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))})
        self.head = nn.Linear(dim, 2 * code_dim)

    def null_condition(self, condition: Condition) -> Condition:
        """Return the unconditional text for guidance: for each row as many learned rows as its own text has."""
        given = condition.require("text")
        rows, known = given.shape[1], read_weight(self, "cfg_uncond")
        mask = condition.caption_mask
        mask = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if mask is None else mask.bool()
        place = (torch.arange(rows, device=given.device) - (~mask).sum(1, keepdim=True)).clamp_min(0)  # valid rows are last
        return Condition(caption_embeds=known.to(given)[place] * mask[..., None], caption_mask=mask)

    def new_cache(self, plan: ScalePlan, rows: int, text: int, device: torch.device | None = None) -> InfinityCache:
        """Create a cache for images of these scales, with `rows` rows of at most `text` text rows each."""
        shape = len(self.blocks), rows, self.n_head, self.head_dim
        return InfinityCache(plan, shape, text=text, dtype=self.dtype, device=device or self.device)

    def forward(
        self,
        inputs: Tensor | None = None,
        condition: Condition | None = None,
        *,
        cache: InfinityCache,
        logits_of: int | None = None,
        guidance: PassGuidance | None = None,
        tile: int | None = None,
    ) -> VAROutput:
        """Run one pass: the first with a condition, over scale 0 and the scales in `inputs`; or one over scales after that.

        Args:
            inputs: `[R, T, C]`, inputs of complete scales: the sum of codes so far, resized to each. Scale 0 has none.
            cache: of all scales before, and of the text after the first pass. One with no scale for teacher forcing.
            logits_of: number of last fed scales for which logits are computed. Default: all fed scales.
            guidance: see `PassGuidance`. The head is linear, so guiding its input is guiding the logits, at half of the work.
            tile: see `InfinityBlock`.

        Returns:
            Logits float32 `[R, T, 2 C]`, of the values 0 and 1 of each bit, and the input of the head `[R, T, D]`; R/2 rows
            under guidance.
        """
        first, ends = cache.scale, cache.ends
        last = find_last_scale(ends[1:], first, inputs, condition)
        end, parts = ends[last + 1], [] if condition is None else [self._start(condition, cache)]
        if inputs is not None:
            parts.append(self.word_embed(inputs.to(self.dtype)).float())
        assert cache.modulation is not None
        place = slice(ends[first], end)
        x = torch.cat(parts, dim=1) + self.lvl_embed(cache.levels[place]).float()
        visible = None if first == last else cache.levels[place, None] >= cache.levels[None, :end]
        rotary = rotary_factors(cache.rotary[place], compiled=self.blocks[0]._compiled_call_impl is not None)
        mask = None if cache.prefix_mask is None else cache.prefix_mask[:, None, None]
        for i, block in enumerate(self.blocks):
            text = cache.text_k[i], cache.text_v[i]
            x = block(x, cache.modulation.blocks[i], cache.layer(i, ends[first]), text, mask, rotary, visible, tile)
            if guidance is not None and i in guidance.blocks:
                x = torch.where(guidance.strength[:, None] == 0, x, guidance.apply(x).repeat(2, 1, 1))
        cache.scale = last + 1
        wanted = first if logits_of is None else max(first, last + 1 - logits_of)
        features = modulate(x[:, ends[wanted] - ends[first] :], *cache.modulation.head.unbind(0))
        if guidance is not None:
            features = guidance.apply(features) if guidance.at_logits else features.chunk(2)[0]
        features = features.to(self.dtype)
        return VAROutput(self.head(features).float(), features)

    def _start(self, condition: Condition, cache: InfinityCache) -> Tensor:
        """Fill what a cache has of the text, and return the input of scale 0, float32 `[R, 1, D]`."""
        given, mask = condition.require("text"), condition.caption_mask
        if given.shape[1] > self.config.caption_rows:
            raise ValueError(f"a text has at most {self.config.caption_rows} rows, got {given.shape[1]}")
        pooled, text = self.embed_text(given, mask)
        modulation = make_modulation(pooled, self.blocks, self.head_nm, self.shared_ada_lin)
        cache.keep(Modulation(modulation.blocks.float(), modulation.head.float()), None if mask is None else mask.bool())
        for i, block in enumerate(self.blocks):
            for held, found in zip((cache.text_k[i], cache.text_v[i]), block.ca(text), strict=True):
                held.copy_(found)
        return (pooled[:, None] + self.pos_start).float()

    def embed_text(self, text_RPE: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the condition vector `[R, D]` and what blocks attend to, `[R, P, D]`; mask bool `[R, P]`."""
        text = text_RPE.float()
        scale = torch.rsqrt(text.square().mean(-1, keepdim=True) + _NORM_EPS)
        text = (text * scale * read_weight(self.text_norm).float()).to(self.dtype)
        pooled = self.text_proj_for_sos["ca"](text, None if mask is None else mask.bool()[:, None, None])
        return pooled, self.text_proj_for_ca(text)


def feed_forward_width(dim: int) -> int:
    """Return the width of the feed-forward: 4 `dim`, rounded to a multiple of 256, halves to an even one, as officially."""
    return max(1, round(4 * dim / 256)) * 256


def parameter_count(depth: int, dim: int, n_head: int, code_dim: int, caption_dim: int = 2048, caption_rows: int = 512) -> int:
    """Return the number of parameters of a size, by formula."""
    hidden = feed_forward_width(dim)
    block = 8 * dim * dim + 2 * dim * hidden + hidden + 15 * dim + n_head
    text = (caption_rows + 1) * caption_dim + 3 * caption_dim * dim + 2 * dim * dim + 5 * dim
    return depth * block + text + (_LEVELS + 1) * dim + (code_dim + 1) * dim + 8 * (dim * dim + dim) + 2 * code_dim * (dim + 1)
