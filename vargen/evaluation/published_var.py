"""VAR's published sampling loop, reimplemented plainly as the reference of `vargen bench images`.

At every scale, it does what vargen does once or not at all: it computes each block's modulation from the condition, grows keys
and values by concatenation, runs the head on the conditional and the unconditional rows of every token, filters by sorting the
whole vocabulary, and samples with one generator for the batch. All of it is in float32. Algorithm: Tian et al. 2024
(arXiv:2404.02905), algorithm 2 and section 3; the weights are those of a `VARTransformer`.

Shape suffixes: R rows (conditional, then unconditional), T tokens of a pass, P caption rows, D width, V codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer

_MAX_LOG_SCALE = math.log(100)


class PublishedVARSampler:
    """Generates images as the published code does.

    Args:
        transformer: in float32.
        vqvae: its tokenizer.
    """

    def __init__(self, transformer: VARTransformer, vqvae: MultiScaleVQModel):
        self.transformer, self.vqvae = transformer, vqvae

    @torch.no_grad()
    def __call__(
        self,
        condition: Condition,
        generator: torch.Generator,
        guidance_scale: float,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> tuple[list[Tensor], Tensor]:
        """Return tokens int64 `[B, n]` of each scale, and the sum of their embeddings, `[B, C, R, G]`."""
        model, scales = self.transformer, self.transformer.scales
        rows = condition.cat(model.null_condition(condition))
        vector_RD, prefix, mask = model.embed_condition(rows)
        B, P = len(vector_RD) // 2, 0 if prefix is None else prefix.shape[1]
        keys: list[Tensor | None] = [None] * len(model.blocks)
        values: list[Tensor | None] = [None] * len(model.blocks)
        canvas, scale_tokens = self.vqvae.zero_latent(B), []
        following: Tensor | None = None
        for k in range(len(scales)):
            place = slice(model.first_token_of(k), model.ends[k])
            x = vector_RD[:, None] + model.pos_start if following is None else model.word_embed(following.repeat(2, 1, 1))
            x = x + model.lvl_embed(model.lvl_1L[:, place]) + model.pos_1LC[:, place]
            if k == 0 and prefix is not None:
                x = torch.cat([prefix, x], dim=1)
            visible = self._visible(k, P, mask)
            shared = model.shared_ada_lin(vector_RD) if model.config.shared_aln else None
            for i, block in enumerate(model.blocks):
                x, keys[i], values[i] = self._block(block, x, vector_RD, shared, visible, keys[i], values[i])
            x = x[:, -(scales[k] ** 2) :]
            scale, shift = model.head_nm.ada_lin(vector_RD)[:, None].chunk(2, dim=-1)
            conditional, unconditional = model.head(_norm(x) * (1 + scale) + shift).chunk(2)
            strength = (guidance_scale - 1) * k / max(len(scales) - 1, 1)
            logits = (1 + strength) * conditional - strength * unconditional
            logits[..., self.vqvae.scale_codes[k] :] = float("-inf")
            probs = _filtered(logits / temperature, top_k, top_p).softmax(-1)
            tokens = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(B, -1)
            scale_tokens.append(tokens)
            canvas, following = self.vqvae.next_input(canvas, tokens, k)
        return scale_tokens, canvas

    def _visible(self, scale: int, prefix: int, mask: Tensor | None) -> Tensor | None:
        """Attention mask of a pass over caption rows and tokens so far: bool `[R, 1, T, S]`, None for all visible."""
        if mask is None:
            return None
        end, side = prefix + self.transformer.ends[scale], self.transformer.scales[scale]
        seen = F.pad(mask, (0, end - prefix), value=True)[:, None].repeat(1, side * side, 1)
        if scale == 0:  # the caption is fed in this pass, and attends only to itself
            own = F.pad(mask[:, None].repeat(1, prefix, 1), (0, side * side), value=False)
            own = own | torch.eye(prefix, end, dtype=torch.bool, device=mask.device)
            seen = torch.cat([own, seen], dim=1)
        return seen[:, None]

    def _block(
        self,
        block: Any,
        x: Tensor,
        vector_RD: Tensor,
        shared: Tensor | None,
        visible: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output of a block, and its keys and values including those of this pass."""
        if shared is not None:
            modulation = shared.unflatten(-1, (1, 6, -1)) + block.ada_gss
        else:
            modulation = block.ada_lin(vector_RD).unflatten(-1, (1, 6, -1))
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(2)
        attention = block.attn
        bias = torch.cat([attention.q_bias, attention.zero_k_bias, attention.v_bias])
        fused = F.linear(_norm(x) * (1 + scale1) + shift1, attention.mat_qkv.weight, bias)
        q, k, v = fused.unflatten(-1, (3, attention.n_head, -1)).permute(2, 0, 3, 1, 4)
        if attention.l2_norm:
            q = F.normalize(q, dim=-1) * attention.scale_mul_1H11.clamp_max(_MAX_LOG_SCALE).exp()
            k = F.normalize(k, dim=-1)
        else:
            q = q * (0.25 / math.sqrt(attention.head_dim))
        keys = k if keys is None else torch.cat([keys, k], dim=2)
        values = v if values is None else torch.cat([values, v], dim=2)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=1.0)
        x = x + gain1 * attention.proj(out.transpose(1, 2).flatten(2))
        return x + gain2 * block.ffn(_norm(x) * (1 + scale2) + shift2), keys, values


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def _filtered(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Top-k, then top-p filter: other logits become -inf. The nucleus is found by sorting all logits in ascending order."""
    if top_k is not None:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[..., -1] = False
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
    return logits
