"""An `InfinityTransformer` and its image tokenizer as the loop over scales sees them: tokens are bits.

CFG rows, conditions and passes are those of VAR's adapter, which this one extends.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T tokens of one pass, n tokens of one scale,
C bits of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.models.guidance import Condition, Guidance, cost_key, to_guidance
from vargen.models.infinity.network import InfinityTransformer, PassGuidance
from vargen.models.infinity.schedules import ScalePlan
from vargen.models.storage import validate_offloading
from vargen.models.tokenizers.bsq import BitQuantizer
from vargen.models.var.decoding import VARScaleModel, VARState
from vargen.values import OPTIONS, parse_int, short_repr


@dataclass(frozen=True)
class BitGuidance(Guidance):
    """Guidance of a call of Infinity, with settings by scale.

    Attributes:
        scale: of all scales; of a list the first that is not 1, or 1.
        scales: guidance scale (the official `cfg`) of each scale of the image; None: `scale` for all.
        temperatures: temperature of each scale, above 0, with which the logits are divided in addition; None: none.
        layers: where guidance acts, the official `cfg_insertion_layer`: 0 for the logits, -1 for the output of the last block,
            -2 for that of the one before it, and so on.
    """

    scales: tuple[float, ...] | None = None
    temperatures: tuple[float, ...] | None = None
    layers: tuple[int, ...] = (0,)

    @classmethod
    def make(cls, guidance_scale: Any, temperature: Any, layers: Any, num_scales: int, depth: int) -> BitGuidance:
        """Validate settings: numbers or, one for each scale, lists. A temperature that is a number is not of guidance.

        Raises:
            ValueError: naming the argument.
        """
        given = {"guidance_scale": guidance_scale, "temperature": temperature}
        lists = {name: _read_list(name, value, num_scales) for name, value in given.items()}
        scales, temperatures = lists["guidance_scale"], lists["temperature"]
        if temperatures is not None and 0 in temperatures:
            raise ValueError(f"temperature must be above 0 where it is a list, got {short_repr(temperature)}")
        found, least = [0] if layers is None else layers, 1 - depth
        if not isinstance(found, list | tuple) or not found or any(parse_int(each, least, 0) is None for each in found):
            raise ValueError(f"cfg_insertion_layer must be a list of numbers from {least} to 0, got {short_repr(layers)}")
        scale = guidance_scale if scales is None else next((each for each in scales if each != 1), 1.0)
        return cls(scale, scales=scales, temperatures=temperatures, layers=tuple(found))


def _read_list(name: str, value: Any, num_scales: int) -> tuple[float, ...] | None:
    """Return numbers by scale; None for a value that is not a list."""
    if not isinstance(value, list | tuple):
        return None
    if len(value) != num_scales:
        raise ValueError(f"{name} must be a number, or a list of {num_scales}, one for each scale, got {short_repr(value)}")
    return tuple(float(OPTIONS[name].range.check(name, each) or 0.0) for each in value)


class InfinityScaleModel(VARScaleModel):
    """`ScaleModel` of Infinity. A token of the loop is a bit: the vocabulary is 2, and a scale has n C positions.

    Unconditional rows are dropped as soon as no later scale is guided.

    Args:
        quantizer: of images with the scales of `plan`.
        guidance: see `BitGuidance`; a guidance scale is the official `cfg`, the same at all scales, 1 for none.
        tile: see `InfinityBlock`.
        device: as of `VARScaleModel`.
    """

    guidance: BitGuidance
    transformer: Any
    quantiser: Any

    def __init__(
        self,
        transformer: InfinityTransformer,
        quantizer: BitQuantizer,
        plan: ScalePlan,
        guidance: Guidance | float = 1.0,
        *,
        draft_model: InfinityScaleModel | None = None,
        tile: int | None = None,
        device: torch.device | None = None,
    ):
        validate_offloading(transformer)
        self.transformer, self.quantiser, self.plan, self.tile = transformer, quantizer, plan, tile
        asked = to_guidance(guidance)
        self.guidance = asked if isinstance(asked, BitGuidance) else BitGuidance(asked.scale, negative=asked.negative)
        self.draft_model, self.device = draft_model, device or transformer.device
        self.scale_tokens, self.scale_codes, self.vocab = quantizer.scale_tokens, (2,) * len(plan.scales), 2
        settings = self.guidance.scales, self.guidance.temperatures, self.guidance.layers, plan, tile
        self.cost_key = cost_key(transformer, f"{self.guidance.rows_per_image} rows an image", str(settings))
        self._ends = (0, *plan.ends)
        self.networks = (transformer,)
        depth = len(transformer.blocks)
        self._guided_blocks = tuple(depth + layer for layer in self.guidance.layers if layer < 0)
        self._guidance_ramp = self._make_ramp(self.guidance.scale)

    def _scales(self, guidance_scale: float) -> Sequence[float]:
        """Guidance scale of each scale of the image."""
        return self.guidance.scales or [guidance_scale] * len(self.plan.scales)

    def _make_ramp(self, guidance_scale: float) -> Tensor:
        strength = torch.tensor(self._scales(guidance_scale), dtype=torch.float32, device=self.device) - 1
        return strength[self.plan.levels(self.device)]

    def canvas(self, batch: int) -> Tensor:
        """Zeros `[B, d, rows, columns]`."""
        shape = batch, self.quantiser.bits, *self.quantiser.scales[-1]
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def allocate(self, condition: Condition, slots: int, is_guided: bool = True) -> VARState:
        conditions = self._conditions(condition, is_guided)
        text = max(each.require("text").shape[1] for each in conditions)
        cache = self.transformer.new_cache(self.plan, slots * len(conditions), text, self.device)
        return VARState(cache, len(conditions) == 2)

    def forward(self, state: VARState, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        is_over = all(each == 1 for each in self._scales(self.guidance.scale)[len(inputs) - 1 :])
        return super().forward(state, inputs, 0.0 if is_over else guidance)

    def _run(self, rows: Tensor | None, first: Condition | None, cache: Any, strength: Tensor | None, scale: int) -> Tensor:
        guided = None
        if strength is not None:
            earlier = self._guidance_ramp[self._ends[cache.scale] : self._ends[scale]]
            guided = self._guide(torch.cat([earlier, strength]))
        out = self.transformer(rows, first, cache=cache, logits_of=1, guidance=guided, tile=self.tile)
        logits = out.logits.unflatten(-1, (-1, 2)).flatten(1, 2)
        temperatures = self.guidance.temperatures
        return logits if temperatures is None else logits / temperatures[scale]

    def _guide(self, strength: Tensor) -> PassGuidance:
        return PassGuidance(strength, self._guided_blocks, 0 in self.guidance.layers)

    def forward_all(self, inputs: Tensor, condition: Condition) -> Tensor:
        """See `VARScaleModel`; for each bit, and without temperatures."""
        cache = self.transformer.new_cache(self.plan, len(inputs), condition.require("text").shape[1], self.device)
        guided = self._guide(self._guidance_ramp) if self.guidance.rows_per_image == 2 else None
        logits = self.transformer(inputs, condition, cache=cache, guidance=guided).logits
        return logits.unflatten(-1, (-1, 2)).flatten(1, 2)
