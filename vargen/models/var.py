"""VAR: a transformer that draws a picture scale by scale, every token of a scale in one pass.

Source: Tian et al. 2024, "Visual Autoregressive Modeling: Scalable Image Generation via Next-Scale Prediction"
(arXiv:2404.02905). Parameter names are the official ones, so an official state dict loads strictly once the buffers that
`is_rebuilt` names are left out: they are made here from the scale table.

Conditioning on text is not in the paper: the pooled caption takes the class embedding's place, and the caption's rows stand
before the picture as a prefix that every scale sees.

Shape suffixes: R rows (images; twice as many under guidance), P caption rows, S scales, L image tokens of all scales, T tokens
of one pass, D width, H heads, K head width, E code width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.compat import ensure_torchvision
from vargen.models.condition import Condition

ensure_torchvision()

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput

from vargen.models.multi_scale_vq import SCALES_256, SCALES_512

# The official scale tables: side of every scale, by the side of the picture in pixels.
SCALES: dict[int, tuple[int, ...]] = {
    256: SCALES_256,
    512: SCALES_512,
    1024: (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64),
}
_NORM_EPS = 1e-6
_MOST_SHARPNESS = math.log(100)  # of the logarithm that a head multiplies its unit queries with


def is_rebuilt(name: str) -> bool:
    """Whether an official tensor is a buffer that the scale table determines: no weight, and in no file of ours."""
    return name in ("lvl_1L", "attn_bias_for_masking") or name.endswith(".attn.zero_k_bias")


@dataclass
class VAROutput(BaseOutput):
    """`logits`: float32 `[R, T, V]`; `features`: what the head saw, `[R, T, D]` after the final norm. Both are always set."""

    logits: Tensor
    features: Tensor = None  # type: ignore[assignment]  # a default lets accelerate's hooks rebuild the output from a dict


@dataclass(frozen=True)
class Modulation:
    """What adaptive layer norms do to a row; a function of its label or caption alone, so computed once per picture.

    Attributes:
        blocks: `[depth, 6, R, 1, D]`: gains of attention and feed-forward, scales (one added), shifts. Where blocks share one
            network, the same for all; each adds its offset.
        head: `[2, R, 1, D]`: scale (one added) and shift of the final norm.
    """

    blocks: Tensor
    head: Tensor


class ScaleCache:
    """Static keys and values of every layer, `[depth, R, H, P + L, K]`, and how many scales they hold.

    A scale's keys and values depend on its *input*, which earlier scales determine, not on the tokens drawn at it. So going
    back to a scale is moving `scale`.

    Attributes:
        scale: scales held. modulation: of these rows, set by the first pass. prefix_mask: bool `[R, P]`, valid caption rows.
    """

    def __init__(
        self,
        depth: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        prefix: int,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (depth, rows, heads, prefix + tokens, head_dim)
        self.rows, self.prefix, self.tokens = rows, prefix, tokens
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.scale = 0
        self.modulation: Modulation | None = None
        self.prefix_mask: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, start: int, k_RHTK: Tensor, v_RHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store a pass from slot `start` on; returns the layer's keys and values up to its end."""
        end = start + k_RHTK.shape[2]
        self.k[layer, :, :, start:end] = k_RHTK
        self.v[layer, :, :, start:end] = v_RHTK
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def truncate(self, scale: int) -> None:
        """Forget all scales from `scale` on.

        Raises:
            ValueError: if the cache does not hold that many.
        """
        if not 0 < scale <= self.scale:
            raise ValueError(f"scale must be from 1 to the {self.scale} scales that the cache holds, got {scale}")
        self.scale = scale


class Attention(nn.Module):
    """Fused projections; the keys have no bias. With `l2_norm`, unit queries and keys, and a learned sharpness per head."""

    zero_k_bias: Tensor

    def __init__(self, dim: int, n_head: int, l2_norm: bool):
        super().__init__()
        self.n_head, self.head_dim, self.l2_norm = n_head, dim // n_head, l2_norm
        if l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, n_head, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("zero_k_bias", torch.zeros(dim), persistent=False)
        self.proj = nn.Linear(dim, dim)

    def project(self, x_RTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, already scaled, keys and values `[R, H, T, K]`."""
        q, k, v = self.mat_qkv(x_RTD).chunk(3, dim=-1)
        q, v = q + self.q_bias.type_as(q), v + self.v_bias.type_as(v)
        q, k, v = (part.unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self.l2_norm:
            sharpness = self.scale_mul_1H11.clamp_max(_MOST_SHARPNESS).exp()
            q, k = F.normalize(q.float(), dim=-1) * sharpness, F.normalize(k.float(), dim=-1)
        else:
            q = q * (0.25 / math.sqrt(self.head_dim))
        return q.type_as(v), k.type_as(v), v

    def forward(self, x_RTD: Tensor, visible: Tensor | None, cache: ScaleCache | None, place: tuple[int, int]) -> Tensor:
        q, k, v = self.project(x_RTD)
        if cache is not None:
            k, v = cache.write(*place, k, v)
        if q.device.type == "cpu" and torch.is_grad_enabled():
            # The gradient of torch's fused attention takes 40 % of a training step there, that of these products 8 %.
            scores = q @ k.mT
            if visible is not None:
                scores = torch.where(visible, scores, float("-inf"))
            out = scores.softmax(-1).type_as(v) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=1.0)
        return self.proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward behind adaptive norms: weights of its own for them, or an offset to shared ones."""

    def __init__(self, dim: int, n_head: int, hidden: int, l2_norm: bool, shared: bool):
        super().__init__()
        self.attn = Attention(dim, n_head, l2_norm)
        self.ffn = FeedForward(dim, hidden)
        if shared:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, dim))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        visible: Tensor | None,
        cache: ScaleCache | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """
        Args:
            x: `[R, T, D]`. modulation: `[6, R, 1, D]`. visible: bool `[T, S]` or `[R, 1, T, S]`, None for all.
            place: layer and first slot in the `cache`.
        """
        if hasattr(self, "ada_gss"):
            modulation = modulation + self.ada_gss.view(6, 1, 1, -1)
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(0)
        attended = self.attn(modulated(x, scale1, shift1), visible, cache, place)
        x = torch.addcmul(x, gain1, attended.type_as(x))
        return torch.addcmul(x, gain2, self.ffn(modulated(x, scale2, shift2)).type_as(x))


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Layer norm without weights of its own, times `scale` (one is already added), plus `shift`."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=_NORM_EPS), scale)


class HeadNorm(nn.Module):
    """Holds the final norm's modulation."""

    def __init__(self, dim: int):
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))


class VARTransformer(ModelMixin, ConfigMixin):
    """The next-scale transformer.

    Args:
        condition: `"class"` or `"text"`.
        scales: side of every scale, coarse to fine; those of its image tokenizer. `SCALES` has the official tables.
        depth, dim, n_head: blocks, width, heads. Official sizes are given by depth alone: width 64 depth, `depth` heads.
        vocab_size, code_dim: codes V of the tokenizer, and their width E.
        num_classes: classes, without the null class (`condition="class"`).
        caption_dim, caption_rows: width of caption features, and most rows of a caption (`condition="text"`).
        mlp_ratio: width of the feed-forward, in widths.
        shared_aln: one modulation network for all blocks, as in the official 512 pixel model, instead of one in each.
        attn_l2_norm: unit queries and keys, as in all released weights.

    Raises:
        ValueError: for an unknown condition, a width that the heads do not divide, or scales that do not grow.
    """

    _supports_gradient_checkpointing = False
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _repeated_blocks: ClassVar[list[str]] = ["Block"]
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
        self.ends = list(accumulate(side * side for side in sides))  # tokens up to and with each scale
        if condition == "class":
            self.class_emb = nn.Embedding(num_classes + 1, width)
        else:
            self.caption_proj = _two_layers(caption_dim, width)
            self.caption_cond = _two_layers(caption_dim, width)
            self.null_cond = nn.Parameter(torch.zeros(1, width))
        self.word_embed = nn.Linear(code_dim, width)
        self.pos_start = nn.Parameter(torch.zeros(1, sides[0] ** 2, width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, self.ends[-1], width))
        self.lvl_embed = nn.Embedding(len(sides), width)
        if shared_aln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        hidden = round(width * mlp_ratio)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, attn_l2_norm, shared_aln) for _ in range(depth))
        self.head_nm = HeadNorm(width)
        self.head = nn.Linear(width, vocab_size)
        levels = torch.cat([torch.full((side * side,), i) for i, side in enumerate(sides)])[None]
        self.register_buffer("lvl_1L", levels, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Blocks begin as the identity, the head as a uniform law, modulation as an ordinary layer norm's."""
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
        """Image tokens L of all scales."""
        return self.ends[-1]

    def start_of(self, scale: int) -> int:
        """Tokens before `scale`."""
        return self.ends[scale - 1] if scale else 0

    def null_condition(self, condition: Condition) -> Condition:
        """The unconditional twin for guidance: the null class, or a caption of which no row is valid."""
        if condition.class_labels is not None:
            return Condition(class_labels=torch.full_like(condition.class_labels, self.config.num_classes))
        assert condition.caption_embeds is not None
        shape, device = condition.caption_embeds.shape[:2], condition.caption_embeds.device
        return Condition(
            caption_embeds=torch.zeros_like(condition.caption_embeds),
            caption_mask=torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def new_cache(self, rows: int, prefix: int = 0, device: torch.device | None = None) -> ScaleCache:
        """A cache for `rows` rows of `prefix` caption rows each.

        Args:
            device: where passes run; default: where the weights are, which is elsewhere while they are offloaded.
        """
        return ScaleCache(
            self.config.depth,
            rows,
            self.n_head,
            self.head_dim,
            prefix=prefix,
            tokens=self.tokens,
            dtype=self.dtype,
            device=device or self.device,
        )

    def forward(
        self,
        inputs: Tensor | None = None,
        condition: Condition | None = None,
        cache: ScaleCache | None = None,
        logits_of: int | None = None,
        return_dict: bool = True,
    ) -> VAROutput | tuple[Tensor, Tensor]:
        """One pass, in one of three forms.

        Teacher forcing (`inputs`, `condition`): all scales up to the last of `inputs`, block-causal, without a cache.
        First pass (`condition`, `cache`, perhaps `inputs`): caption and scale 0, and the scales that `inputs` hold, which is
        how a model takes over from another: one block-causal pass.
        Next pass (`inputs`, `cache`): the scale after those that the cache holds, or several.

        Args:
            inputs: `[R, T, E]`, the inputs of whole scales: the sum of the codes so far, resized to each. Scale 0 has none.
            condition: of the R rows.
            logits_of: head rows for this many of the last scales fed; default: for all fed.

        Returns:
            Logits `[R, T, V]` and features of the scales fed (without caption rows).

        Raises:
            ValueError: if the combination of arguments is none of the three, or `inputs` end inside a scale.
        """
        features = self.hidden(inputs, condition, cache, logits_of)
        logits = self.head(features).float()
        return VAROutput(logits=logits, features=features) if return_dict else (logits, features)

    def hidden(
        self,
        inputs: Tensor | None = None,
        condition: Condition | None = None,
        cache: ScaleCache | None = None,
        features_of: int | None = None,
    ) -> Tensor:
        """What the head sees, `[R, T, D]`: `forward` without the head, which training fuses with its loss."""
        first = cache.scale if cache is not None else 0
        if (condition is None) == (first == 0) or (inputs is None and (cache is None or condition is None)):
            raise ValueError("pass (inputs, condition), (condition, an empty cache) or (inputs, a cache that holds scales)")
        begin = self.start_of(first)
        count = 0 if inputs is None else inputs.shape[1]
        last = self._last_scale(begin + count + (self.ends[0] if condition is not None else 0))
        modulation, x, mask = self._enter(inputs, condition, cache, begin)
        prefix = x.shape[1] - (self.ends[last] - begin)
        if cache is not None and condition is not None:
            cache.modulation, cache.prefix_mask = modulation, mask
        slots = cache.prefix if cache is not None else prefix
        visible = self._visible(first, last, prefix, slots, mask)
        place = 0 if condition is not None else slots + begin
        for i, block in enumerate(self.blocks):
            x = block(x, modulation.blocks[i], visible, cache, (i, place) if cache is not None else (0, 0))
        if cache is not None:
            cache.scale = last + 1
        wanted = first if features_of is None else max(first, last + 1 - features_of)
        return modulated(x[:, prefix + self.start_of(wanted) - begin :], *modulation.head.unbind(0))

    def _last_scale(self, end: int) -> int:
        if end not in self.ends:
            raise ValueError(f"inputs must hold whole scales, ending at {', '.join(map(str, self.ends))} tokens, got {end}")
        return self.ends.index(end)

    def _enter(
        self, inputs: Tensor | None, condition: Condition | None, cache: ScaleCache | None, begin: int
    ) -> tuple[Modulation, Tensor, Tensor | None]:
        """Modulation, the embedded rows of a pass `[R, prefix + T, D]`, and which caption rows are valid."""
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
        """What modulates and starts the picture `[R, D]`; the caption as a prefix `[R, P, D]`, and its valid rows `[R, P]`.

        Raises:
            ValueError: if the condition is not of the model's kind, or a caption has too many rows.
        """
        given = condition.class_labels if self.config.condition == "class" else condition.caption_embeds
        if given is None:
            raise ValueError(f"this model is conditioned on {self.config.condition}; the condition holds none")
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
        """Of rows with these condition vectors; see `embed_condition`."""
        if self.config.shared_aln:
            blocks = self.shared_ada_lin(vector_RD).unflatten(-1, (6, -1)).expand(self.config.depth, -1, -1, -1)
        else:
            blocks = torch.stack([block.ada_lin(vector_RD).unflatten(-1, (6, -1)) for block in self.blocks])
        blocks = blocks.permute(0, 2, 1, 3)  # [depth, 6, R, D]
        blocks = blocks + blocks.new_tensor([0, 0, 1, 1, 0, 0]).view(6, 1, 1)
        head = self.head_nm.ada_lin(vector_RD).unflatten(-1, (2, -1)).transpose(0, 1)
        head = torch.stack([head[0] + 1, head[1]])
        return Modulation(blocks[:, :, :, None], head[:, :, None])

    def _visible(self, first: int, last: int, fed_prefix: int, held_prefix: int, mask: Tensor | None) -> Tensor | None:
        """bool `[T, S]` or `[R, 1, T, S]`: a token sees its own scale, all coarser ones, and the caption; None for everything.

        Caption rows see the caption alone, padding among them itself too, so that no row sees nothing.
        """
        if first == last and not held_prefix:
            return None
        levels = F.pad(self.lvl_1L[0, : self.ends[last]], (held_prefix, 0), value=-1)
        fed = levels[len(levels) - (self.ends[last] - self.start_of(first)) - fed_prefix :]
        visible = fed[:, None] >= levels[None]
        if mask is None or not held_prefix:
            return visible
        seen = visible & F.pad(mask, (0, len(levels) - held_prefix), value=True)[:, None]
        if fed_prefix:
            seen = seen | torch.eye(len(fed), len(levels), dtype=torch.bool, device=seen.device)
        return seen[:, None]


def _two_layers(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))


def official_config(depth: int, pixels: int = 256) -> dict[str, Any]:
    """Arguments of the released sizes: depths 16, 20, 24 and 30 at 256 pixels, and 36, with shared modulation, at 512."""
    return {"depth": depth, "scales": SCALES[pixels], "shared_aln": depth == 36}
