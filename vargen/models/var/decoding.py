"""A `VARTransformer` and its image tokenizer as the loop over scales sees them: CFG rows, caches and the sum over scales.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T tokens of one pass, n of one scale, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import ScaleModel
from vargen.kernels import ops
from vargen.kernels.host import inference_mode_for
from vargen.models.guidance import Condition, Guidance, cost_key, to_guidance
from vargen.models.storage import validate_offloading
from vargen.models.tokenizers.multi_scale_vq import MultiScaleQuantizer
from vargen.models.var.blocks import ScaleCache
from vargen.models.var.network import VARTransformer


@dataclass
class VARState:
    """State of B images: the cache of their rows, and the condition of these.

    Attributes:
        cache: of R rows: B, or 2 B if `is_guided`.
        condition: of all rows.
        conditional: the cache of the first B rows alone, in the same memory, once a scale is not guided. It goes on alone:
            guidance does not resume.
    """

    cache: ScaleCache
    is_guided: bool
    condition: Condition | None = None
    conditional: ScaleCache | None = None


class VARScaleModel(ScaleModel):
    """`ScaleModel` of a VAR transformer.

    Args:
        quantiser: quantizer of its image tokenizer, on `device`.
        guidance: classifier-free guidance, or its scale. Guidance grows linearly from none at the first scale to this value at
            the last, as published. The official `cfg` is this value minus 1.
        device: of the passes. Default: the device of the weights, which is a different one while they are offloaded.
    """

    def __init__(
        self,
        transformer: VARTransformer,
        quantiser: MultiScaleQuantizer,
        guidance: Guidance | float = 1.0,
        *,
        draft_model: VARScaleModel | None = None,
        device: torch.device | None = None,
    ):
        validate_offloading(transformer)
        self.transformer, self.quantiser = transformer, quantiser
        self.guidance, self.draft_model = to_guidance(guidance), draft_model
        self.device = device or transformer.device
        self.scale_tokens = tuple(side * side for side in transformer.scales)
        self.scale_codes, self.vocab = quantiser.scale_codes, transformer.config.vocab_size
        self.cost_key = cost_key(transformer, f"{self.guidance.rows_per_image} rows an image", transformer.pass_backend)
        self._ends = (0, *transformer.ends)
        self.networks = (transformer, quantiser)
        self._guidance_ramp = self._make_ramp(self.guidance.scale)

    def _make_ramp(self, guidance_scale: float) -> Tensor:
        """Guidance strength of each token, float32 `[L]`."""
        S = len(self.scale_tokens)
        strength = torch.arange(S, dtype=torch.float32, device=self.device) * ((guidance_scale - 1) / max(S - 1, 1))
        repeats = torch.tensor(self.scale_tokens, device=self.device)
        return strength.repeat_interleave(repeats, output_size=sum(self.scale_tokens))

    def canvas(self, batch: int) -> Tensor:
        """Zeros `[B, E, side, side]`."""
        side = self.quantiser.scales[-1]
        return torch.zeros(batch, self.transformer.config.code_dim, side, side, dtype=torch.float32, device=self.device)

    def add(self, canvas: Tensor, tokens: Tensor, scale: int) -> tuple[Tensor, Tensor | None]:
        canvas = canvas + self.quantiser.lookup(tokens, scale)
        return canvas, self.quantiser.transformer_input(canvas, scale + 1)

    def allocate(self, condition: Condition, slots: int, is_guided: bool = True) -> VARState:
        conditions = self._conditions(condition, is_guided)
        prefix = max(0 if each.caption_embeds is None else each.caption_embeds.shape[1] for each in conditions)
        return VARState(self.transformer.new_cache(slots * len(conditions), prefix, self.device), len(conditions) == 2)

    def reset(self, state: VARState, condition: Condition) -> None:
        state.condition = reduce(Condition.cat, self._conditions(condition, state.is_guided))
        state.cache.scale, state.conditional = 0, None
        if condition.scale is not None:
            self._guidance_ramp.copy_(self._make_ramp(condition.scale))

    def _conditions(self, condition: Condition, is_guided: bool) -> list[Condition]:
        """Return the condition of the conditional rows and, if any scale is guided, that of the unconditional rows.

        Captions are trimmed to the longest one where this needs no synchronization, since padding costs as much as valid rows.
        """
        conditions = self.guidance.conditions(condition, self.transformer)
        captions: list[Any] = [(each.caption_embeds, each.caption_mask) for each in conditions]
        counts = [None if mask is None else ops.host_values(mask.sum(1)) for _, mask in captions]
        if None not in counts:
            used = max(1, *(max(each or [0]) for each in counts))
            conditions = [Condition(None, embeds[:, -used:], mask[:, -used:]) for embeds, mask in captions]
        return conditions if is_guided else conditions[:1]

    def forward(self, state: VARState, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        scale, strength = len(inputs) - 1, None
        if state.is_guided and guidance:
            strength = self._guidance_ramp[self._ends[scale] : self._ends[scale + 1]]
            strength = strength if guidance == 1 else strength * guidance
        cache = state.cache
        if state.is_guided and not guidance:
            cache = state.conditional = state.conditional or cache.select_rows(slice(0, cache.rows // 2))
        first = state.condition if cache.scale == 0 else None
        with inference_mode_for(self.device):
            fed = [part for part in inputs[cache.scale :] if part is not None]
            rows = torch.cat(fed, dim=1) if len(fed) > 1 else fed[0] if fed else None
            if rows is not None and len(rows) < cache.rows:
                rows = rows.repeat(cache.rows // len(rows), 1, 1)
            return self._run(rows, first, cache, strength, scale)

    def _run(self, rows: Tensor | None, first: Condition | None, cache: Any, strength: Tensor | None, scale: int) -> Tensor:
        """Run a pass over inputs `[R, T, E]`, with the condition in the first one; returns logits `[B, n, codes]`."""
        out = self.transformer(rows, condition=first, cache=cache, logits_of=1, guidance=strength)
        return out.logits[..., : self.scale_codes[scale]]

    def forward_all(self, inputs: Tensor, condition: Condition) -> Tensor:
        """Run one block-causal pass over all scales, whose inputs `[R, L, E]` are known; guided logits `[B, L, V]`."""
        strength = self._guidance_ramp if self.guidance.rows_per_image == 2 else None
        return self.transformer(inputs, condition, guidance=strength).logits

    def set_cached(self, state: VARState, scales: int) -> None:
        for cache in (state.cache, state.conditional):
            if cache is not None:
                cache.scale = scales
