"""Adapter of a `VARTransformer` and its image tokenizer for decoding: CFG rows, caches and the sum over scales.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T tokens of one pass, n of one scale, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vargen.adapters import Guidance, cost_key, num_rows, to_guidance
from vargen.decoding.sampling import apply_guidance
from vargen.device import inference_mode_for
from vargen.models.condition import Condition
from vargen.models.offloading import validate_offloading
from vargen.models.tokenizers.multi_scale_quantizer import MultiScaleQuantizer
from vargen.models.var import VARTransformer
from vargen.models.var_blocks import ScaleCache


class VARState:
    """Cache state of B images: conditional rows and, under guidance, unconditional rows.

    Unconditional rows may hold fewer scales: they skip the scales without guidance, and catch up when guidance resumes.

    Attributes:
        full_cache: cache of all rows.
        row_caches: caches of the conditional and of the unconditional rows, views of the memory of `full_cache`.
        conditions: condition of each of `row_caches`.
    """

    def __init__(self, cache: ScaleCache, conditions: Sequence[Condition]):
        self.full_cache, self.conditions = cache, conditions
        B = cache.rows // len(conditions)
        self.row_caches = [cache.select_rows(slice(start, start + B)) for start in range(0, cache.rows, B)]

    @property
    def in_sync(self) -> bool:
        """Whether all rows hold the same scales."""
        return self.row_caches[0].scale == self.row_caches[-1].scale

    def as_one_batch(self) -> tuple[ScaleCache, Condition]:
        """Return all rows as one cache, and their joint condition. Requires `in_sync`."""
        first, last = self.row_caches
        self.full_cache.scale = first.scale
        if first.scale and self.full_cache.modulation is None:  # conditional and unconditional rows were started separately
            assert first.modulation is not None and last.modulation is not None
            self.full_cache.modulation = first.modulation.cat(last.modulation)
            if first.prefix_mask is not None and last.prefix_mask is not None:
                self.full_cache.prefix_mask = torch.cat([first.prefix_mask, last.prefix_mask])
        return self.full_cache, self.conditions[0].cat(self.conditions[1])

    def split_rows(self) -> None:
        """Update `row_caches` from `full_cache` after a pass over all rows."""
        B = self.full_cache.rows // 2
        self.row_caches = [self.full_cache.select_rows(slice(0, B)), self.full_cache.select_rows(slice(B, 2 * B))]


class VARScaleModel:
    """`ScaleModel` of a VAR transformer.

    Args:
        transformer: the network.
        quantiser: quantizer of its image tokenizer, on `device`.
        guidance: classifier-free guidance, or its scale. Guidance grows linearly from none at the first scale to this value at
            the last, as published. The official `cfg` is this value minus 1.
        draft_model: a smaller model with the same tokens.
        device: device of the passes. Default: the device of the weights, which is a different one while they are offloaded.
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
        self.scale_codes = quantiser.scale_codes
        self._ends = (0, *transformer.ends)
        S = len(self.scale_tokens)
        strength = torch.arange(S, dtype=torch.float32, device=self.device) * ((self.guidance.scale - 1) / max(S - 1, 1))
        self._guidance_ramp = strength.repeat_interleave(torch.tensor(self.scale_tokens, device=self.device))

    @property
    def cost_key(self) -> str:
        return cost_key(self.transformer, f"{self.guidance.rows_per_image} rows an image", self.transformer.pass_backend)

    @property
    def vocab(self) -> int:
        return self.transformer.config.vocab_size

    # -- the sum over scales ------------------------------------------------------------------------------------------

    def canvas(self, batch: int) -> Tensor:
        """Zeros `[B, E, side, side]`."""
        side = self.quantiser.scales[-1]
        return torch.zeros(batch, self.transformer.config.code_dim, side, side, dtype=torch.float32, device=self.device)

    def add(self, canvas: Tensor, tokens: Tensor, scale: int) -> tuple[Tensor, Tensor | None]:
        side = self.quantiser.scales[scale]
        canvas = canvas + self.quantiser.lookup(tokens.unflatten(1, (side, side)), scale)
        return canvas, self.quantiser.transformer_input(canvas, scale + 1)

    # -- passes -------------------------------------------------------------------------------------------------------

    def start(self, condition: Condition) -> VARState:
        conditions = self.guidance.conditions(condition, self.transformer)
        if self.device.type == "cpu":  # on a GPU this would synchronize, and fixed shapes allow graph capture
            conditions = _trim_padding(conditions)
        rows = self.guidance.rows_per_image * num_rows(condition)
        prefix = max(0 if each.caption_embeds is None else each.caption_embeds.shape[1] for each in conditions)
        return VARState(self.transformer.new_cache(rows, prefix, self.device), conditions)

    def forward(self, state: VARState, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        with inference_mode_for(self.device):
            return self._guided(state, inputs, guidance)

    def _guided(self, state: VARState, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        scale = len(inputs) - 1
        strength = self._guidance_strength(scale, guidance)
        if self.guidance.rows_per_image == 1 or not guidance:
            logits = self._pass(state.row_caches[0], state.conditions[0], inputs)
        elif state.in_sync:
            logits = self._pass(*state.as_one_batch(), inputs, strength)
            state.split_rows()
        else:
            conditional, unconditional = (
                self._pass(cache, condition, inputs)
                for cache, condition in zip(state.row_caches, state.conditions, strict=True)
            )
            logits = apply_guidance(conditional, unconditional, 1 + strength[:, None])
        return logits[..., : self.scale_codes[scale]]

    def _pass(
        self,
        cache: ScaleCache,
        condition: Condition,
        inputs: Sequence[Tensor | None],
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Run a pass, and return the logits of the last scale. The cache then holds all scales in `inputs`."""
        fed = [part for part in inputs[cache.scale :] if part is not None]
        rows = torch.cat(fed, dim=1) if len(fed) > 1 else fed[0] if fed else None
        if rows is not None and len(rows) < cache.rows:
            rows = rows.repeat(cache.rows // len(rows), 1, 1)
        first = condition if cache.scale == 0 else None
        return self.transformer(rows, condition=first, cache=cache, logits_of=1, guidance=guidance).logits

    def _guidance_strength(self, scale: int, factor: float) -> Tensor:
        """Guidance strength `[n]` for the tokens of a scale."""
        strength = self._guidance_ramp[self._ends[scale] : self._ends[scale + 1]]
        return strength if factor == 1 else strength * factor

    def rollback(self, state: VARState, scale: int) -> None:
        for cache in state.row_caches:
            if scale == 0:
                cache.scale = 0
            elif cache.scale > scale:
                cache.truncate(scale)


def _trim_padding(conditions: list[Condition]) -> list[Condition]:
    """Trim captions to the longest one, since padding rows cost as much as valid ones."""
    masks = [each.caption_mask for each in conditions]
    if any(mask is None for mask in masks):
        return conditions
    used = max(1, *(int(mask.sum(1).max()) for mask in masks if mask is not None))
    cut = []
    for each in conditions:
        assert each.caption_embeds is not None and each.caption_mask is not None
        cut.append(Condition(caption_embeds=each.caption_embeds[:, -used:], caption_mask=each.caption_mask[:, -used:]))
    return cut
