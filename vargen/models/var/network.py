"""VAR: a transformer that generates an image scale by scale, all tokens of a scale in one pass.

Source: Tian et al. 2024, "Visual Autoregressive Modeling: Scalable Image Generation via Next-Scale Prediction"
(arXiv:2404.02905). Parameter names are the official ones. An official state dict loads strictly without the buffers that
`is_derived_buffer` names, which are computed from the scale table here.

Text conditioning is not in the paper: the pooled caption replaces the class embedding, and the caption's rows precede the
image tokens as a prefix that is visible to every scale.

Shape suffixes: R rows (images; twice as many under guidance), P caption rows, S scales, L image tokens of all scales, T tokens
of one pass, D width, H heads, K head width, E code width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.int8.load import SCALE_PASS, CompiledCode
from vargen.models.guidance import Condition
from vargen.models.quantization import replace_linear_layers
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401
from vargen.models.tokenizers.multi_scale_vq import SCALES_256, SCALES_512
from vargen.models.var import int8
from vargen.models.var.blocks import Modulation, ScaleCache, VARBlock, make_caption_mlp, make_modulation, modulate

# Official scale tables: sides of the scales, by the image size in pixels.
SCALES = {256: SCALES_256, 512: SCALES_512, 1024: (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)}


def is_derived_buffer(name: str) -> bool:
    """Whether an official tensor is a buffer derived from the scale table, which is not stored in vargen's weight files."""
    return name in ("lvl_1L", "attn_bias_for_masking") or name.endswith(".attn.zero_k_bias")


class VAROutput(NamedTuple):
    """Logits float32 `[R, T, V]`, and the input of the head, `[R, T, D]` after the final norm."""

    logits: Tensor
    features: Tensor


class VARTransformer(QuantizedStorageMixin, ConfigMixin):
    """The next-scale transformer.

    Args:
        condition: `"class"` or `"text"`.
        scales: sides of the scales of the image tokenizer, coarse to fine. `SCALES` has the official tables.
        depth, dim, n_head: blocks, width, heads. Official sizes depend only on the depth: width 64 depth, `depth` heads.
        vocab_size, code_dim: number of codes V of the tokenizer, and their dimension E.
        num_classes: number of classes, without the null class (`condition="class"`).
        caption_dim, caption_rows: width and maximum number of caption features (`condition="text"`).
        mlp_ratio: width of the feed-forward relative to `dim`.
        shared_aln: one modulation network for all blocks, as in the official 512-pixel model, instead of one per block.
        attn_l2_norm: unit queries and keys, as in all released weights.
    """

    # Read once per image, or a few rows per pass.
    partly_read_parameters = ("ada_lin", "class_emb", "caption_", "null_cond", "pos_", "lvl_embed")
    _no_split_modules: ClassVar[list[str]] = ["VARBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"depth": ("blocks.",)}
    float_layers: ClassVar[tuple[str, ...]] = ("word_embed", "ada_lin", "caption_")
    _repeated_blocks: ClassVar[list[str]] = ["VARBlock"]
    compiled_code: ClassVar[CompiledCode | None] = SCALE_PASS
    _skip_layerwise_casting_patterns: ClassVar[list[str]] = ["norm", "embed", "emb", "head_nm", "pos_", "ada_"]

    lvl_1L: Tensor

    @register_to_config
    def __init__(
        self,
        condition: Literal["class", "text"] = "class",
        scales: Sequence[int] = SCALES_256,
        depth: int = 16,
        dim: int | None = None,
        n_head: int | None = None,
        vocab_size: int = 4096,
        code_dim: int = 32,
        num_classes: int = 1000,
        caption_dim: int = 384,
        caption_rows: int = 32,
        mlp_ratio: float = 4.0,
        shared_aln: bool = False,
        attn_l2_norm: bool = True,
        weight_format: str | None = None,
        quantization: str | None = None,
    ):
        super().__init__()
        width, heads, sides = dim or 64 * depth, n_head or depth, tuple(scales)
        if condition not in ("class", "text"):
            raise ValueError(f"condition must be 'class' or 'text', got {condition!r}")
        if width % heads:
            raise ValueError(f"dim must be divisible by n_head, got {width} / {heads}")
        if not sides or sides[0] < 1 or any(b <= a for a, b in pairwise(sides)):
            raise ValueError(f"scales must be sides that grow, at least one, got {sides}")
        self.scales, self.n_head, self.head_dim = sides, heads, width // heads
        self.ends = list(accumulate(side * side for side in sides))  # cumulative number of tokens, including each scale
        if condition == "class":
            self.class_emb = nn.Embedding(num_classes + 1, width)
        else:
            self.caption_proj = make_caption_mlp(caption_dim, width)
            self.caption_cond = make_caption_mlp(caption_dim, width)
            self.null_cond = nn.Parameter(torch.zeros(1, width))
        self.word_embed = nn.Linear(code_dim, width)
        self.pos_start = nn.Parameter(torch.zeros(1, sides[0] ** 2, width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, self.ends[-1], width))
        self.lvl_embed = nn.Embedding(len(sides), width)
        if shared_aln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        hidden = round(width * mlp_ratio)
        self.blocks = nn.ModuleList(VARBlock(width, heads, hidden, attn_l2_norm, shared_aln) for _ in range(depth))
        self.head_nm = nn.ModuleDict({"ada_lin": nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))})
        self.head = nn.Linear(width, vocab_size)
        levels = torch.cat([torch.full((side * side,), i) for i, side in enumerate(sides)])[None]
        self.register_buffer("lvl_1L", levels, persistent=False)
        self._init_weights()
        if quantization is not None:
            replace_linear_layers(self)

    def _init_weights(self) -> None:
        """Initialize blocks as the identity, the head as uniform, and modulation as that of a plain layer norm."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("attn.proj.weight", "ffn.fc2.weight", "ada_lin.1.weight", "head.weight", ".bias")):
                nn.init.zeros_(parameter)
            if name.endswith("scale_mul_1H11"):
                nn.init.constant_(parameter, math.log(4.0))
            if name.endswith("ada_gss") or (name.startswith("blocks.") and name.endswith("ada_lin.1.bias")):
                with torch.no_grad():
                    parameter.zero_().view(6, -1)[:2] = 1.0

    @property
    def tokens(self) -> int:
        """Number of image tokens L of all scales."""
        return self.ends[-1]

    def first_token_of(self, scale: int) -> int:
        """Number of tokens before `scale`."""
        return self.ends[scale - 1] if scale else 0

    def null_condition(self, condition: Condition) -> Condition:
        """Return the unconditional condition for guidance: the null class, or a caption without valid rows."""
        if condition.class_labels is not None:
            return Condition(class_labels=torch.full_like(condition.class_labels, self.config.num_classes))
        blank = torch.zeros_like(condition.require("text"))
        return Condition(caption_embeds=blank, caption_mask=torch.zeros_like(blank[..., 0], dtype=torch.bool))

    def new_cache(self, rows: int, prefix: int = 0, device: torch.device | None = None) -> ScaleCache:
        """Create a cache for `rows` rows with `prefix` caption rows each, on the device of passes; see `VARScaleModel`."""
        if self.quantized and (made := int8.make_scale_cache(self, rows, prefix)) is not None:
            return made
        shape = len(self.blocks), rows, self.n_head, self.head_dim
        place = device or self.device
        return ScaleCache(*shape, prefix=prefix, tokens=self.tokens, dtype=self.dtype, device=place)

    def forward(
        self,
        inputs: Tensor | None = None,
        condition: Condition | None = None,
        cache: ScaleCache | None = None,
        logits_of: int | None = None,
        guidance: Tensor | None = None,
    ) -> VAROutput:
        """Run one pass in one of three forms.

        Teacher forcing (`inputs`, `condition`): all scales up to the last of `inputs`, block-causal, without a cache.
        First pass (`condition`, `cache`, optional `inputs`): one block-causal pass over the caption, scale 0 and the scales in
        `inputs`. With `inputs`, a model continues from the scales of another one.
        Next pass (`inputs`, `cache`): one or more scales after the cached ones.

        Args:
            inputs: `[R, T, E]`, inputs of complete scales: the sum of embeddings so far, resized to each. Scale 0 has none.
            logits_of: number of last fed scales for which logits are computed. Default: all fed scales.
            guidance: guidance strength g `[T]` for each token of these scales. The rows are then R/2 conditional rows followed
                by R/2 unconditional ones, and c + g (c - u) of each pair is returned. The head is linear, so guiding the
                features is equivalent to guiding the logits, at half of the work.

        Returns:
            Logits `[R, T, V]` and features of the fed scales (without caption rows); R/2 rows under guidance.
        """
        if isinstance(cache, int8.Int8ScaleCache):
            last = self._last_scale_of(inputs, condition, cache)
            logits, features = int8.run_pass(self, inputs, condition, cache, last, logits_of, guidance)
        else:
            features = self.forward_features(inputs, condition, cache, logits_of)
            if guidance is not None:
                conditional, unconditional = features.float().chunk(2)
                features = torch.lerp(unconditional, conditional, 1 + guidance[:, None]).to(self.dtype)
            logits = self.head(features).float()
        return VAROutput(logits, features)

    def forward_features(
        self,
        inputs: Tensor | None = None,
        condition: Condition | None = None,
        cache: ScaleCache | None = None,
        features_of: int | None = None,
    ) -> Tensor:
        """Run `forward` without the head, and return its input `[R, T, D]`. Training fuses the head with the loss."""
        first, last = 0 if cache is None else cache.scale, self._last_scale_of(inputs, condition, cache)
        begin = self.first_token_of(first)
        modulation, x, mask = self._embed_inputs(inputs, condition, cache, begin)
        prefix = x.shape[1] - (self.ends[last] - begin)
        if cache is not None and condition is not None:
            cache.keep(modulation, mask)
        slots = cache.prefix if cache is not None else prefix
        visible = self._attention_mask(first, last, prefix, slots, mask)
        place = 0 if condition is not None else slots + begin
        for i, block in enumerate(self.blocks):
            x = block(x, modulation.blocks[i], visible, None if cache is None else cache.layer(i, place))
        if cache is not None:
            cache.scale = last + 1
        wanted = first if features_of is None else max(first, last + 1 - features_of)
        return modulate(x[:, prefix + self.first_token_of(wanted) - begin :], *modulation.head.unbind(0))

    def _last_scale_of(self, inputs: Tensor | None, condition: Condition | None, cache: ScaleCache | None) -> int:
        """Check the arguments of a pass, and return the last scale that it feeds."""
        if inputs is None and (cache is None or condition is None):
            raise ValueError(_BAD_PASS)
        return find_last_scale(self.ends, 0 if cache is None else cache.scale, inputs, condition)

    def _embed_inputs(
        self, inputs: Tensor | None, condition: Condition | None, cache: ScaleCache | None, begin: int
    ) -> tuple[Modulation, Tensor, Tensor | None]:
        """Return the modulation, the embedded inputs of a pass `[R, prefix + T, D]`, and the mask of valid caption rows."""
        if condition is None:
            assert cache is not None and cache.modulation is not None
            parts, prefix, modulation, mask = [], None, cache.modulation, cache.prefix_mask
        else:
            vector_RD, prefix, mask = self.embed_condition(condition)
            modulation = self.modulation(vector_RD)
            parts = [vector_RD[:, None] + self.pos_start]
        if inputs is not None:
            parts.append(self.word_embed(inputs.to(self.word_embed.weight.dtype)))
        x = torch.cat([part.type_as(self.pos_1LC) for part in parts], dim=1)
        place = slice(begin, begin + x.shape[1])
        x = x + self.lvl_embed(self.lvl_1L[:, place]) + self.pos_1LC[:, place]
        if prefix is not None:
            x = torch.cat([prefix.type_as(x), x], dim=1)
        return modulation, x, mask

    def embed_condition(self, condition: Condition) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the condition vector `[R, D]`, the caption as a prefix `[R, P, D]`, and a mask of its valid rows `[R, P]`."""
        given = condition.require(self.config.condition)
        if self.config.condition == "class":
            return self.class_emb(given), None, None
        if given.shape[1] > self.config.caption_rows:
            raise ValueError(f"a caption has at most {self.config.caption_rows} rows, got {given.shape[1]}")
        given = given.to(self.null_cond.dtype)
        mask = condition.caption_mask
        mask = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if mask is None else mask.bool()
        pooled = (given.float() * mask[..., None]).sum(1)
        pooled = (F.normalize(pooled, dim=-1) * self.config.caption_dim**0.5).type_as(given)  # entries near 1
        vector = torch.where(mask.any(1, keepdim=True), self.caption_cond(pooled), self.null_cond)
        return vector, self.caption_proj(given), mask

    def modulation(self, vector_RD: Tensor) -> Modulation:
        """Compute the modulation from condition vectors; see `embed_condition`."""
        shared = self.shared_ada_lin if self.config.shared_aln else None
        return make_modulation(vector_RD, self.blocks, self.head_nm, shared)

    def _attention_mask(self, first: int, last: int, fed_prefix: int, held_prefix: int, mask: Tensor | None) -> Tensor | None:
        """Return the attention bias, `[T, S]` or `[R, 1, T, S]`, or None if everything is visible.

        A token attends to its own scale, all coarser ones and the caption. Caption rows attend only to the caption; padding
        rows also attend to themselves, so that no row is fully masked.
        """
        if first == last and not held_prefix:
            return None
        levels = F.pad(self.lvl_1L[0, : self.ends[last]], (held_prefix, 0), value=-1)
        fed = levels[len(levels) - (self.ends[last] - self.first_token_of(first)) - fed_prefix :]
        visible = fed[:, None] >= levels[None]
        if mask is not None and held_prefix:
            visible = visible & F.pad(mask, (0, len(levels) - held_prefix), value=True)[:, None]
            if fed_prefix:
                visible = visible | torch.eye(len(fed), len(levels), dtype=torch.bool, device=visible.device)
            visible = visible[:, None]
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


_BAD_PASS = "pass (inputs, condition), (condition, an empty cache) or (inputs, a cache that holds scales)"


def find_last_scale(ends: Sequence[int], first: int, inputs: Tensor | None, condition: Condition | None) -> int:
    """Return the last scale that a pass from scale `first` on feeds, where scales end after `ends` tokens; or ValueError."""
    if (condition is None if first == 0 else condition is not None) or (inputs is None and condition is None):
        raise ValueError(_BAD_PASS)
    fed = (0 if inputs is None else inputs.shape[1]) + (ends[0] if condition is not None else 0)
    end = (ends[first - 1] if first else 0) + fed
    for scale, known in enumerate(ends):  # comparisons, because torch.compile finds no symbolic size in a list
        if end == known:
            return scale
    raise ValueError(f"inputs must hold whole scales, ending at {', '.join(map(str, ends))} tokens, got {end}")


def official_config(depth: int, pixels: int = 256) -> dict[str, Any]:
    """Return the arguments of the released sizes: depth 16, 20, 24 and 30 at 256 pixels; 36, with shared modulation, at 512."""
    return {"depth": depth, "scales": SCALES[pixels], "shared_aln": depth == 36}
