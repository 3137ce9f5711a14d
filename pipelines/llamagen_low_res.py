"""A low-resolution transformer beside a LlamaGen transformer, as decoding sees it: it draws a small picture, and an up-sampler
says what that makes likely at the full size.

Shape suffixes: B images, S positions, N tokens of the full grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import Sampling, decode
from vargen.decoding.noise import Purpose, derived
from vargen.decoding.sampling import to_probs
from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.upsampler import TokenUpsampler
from vargen.models.vq import VQModel
from vargen.pipelines.component_files import check_component, saved_network
from vargen.pipelines.families import FAMILIES
from vargen.pipelines.parts import check_parts

if TYPE_CHECKING:
    from vargen.pipelines.llamagen_tokens import LlamaGenTokens

_WINDOW = 16


@dataclass
class _Small:
    """Features `[B, D, R, C]` of the up-sampler, or tokens `[B, N]` where there is none."""

    features: Tensor | None
    tokens: Tensor | None
    sampling: Sampling


class LlamaGenLowRes:
    """`LowResModel` of a low-resolution transformer.

    Args:
        model: it, as decoding sees it.
        grid: of the target.
        upsampler: gives probabilities. None: the picture is decoded, made larger and encoded, and its tokens are the drafts
            (MuLo-SD's up-sampler that needs no training).
        vqvae: the image tokenizer.
    """

    def __init__(self, model: LlamaGenTokens, grid: tuple[int, int], upsampler: TokenUpsampler | None, vqvae: VQModel):
        self.model, self.grid, self.upsampler, self.vqvae = model, grid, upsampler, vqvae

    @property
    def vocab(self) -> int:
        return self.model.vocab

    def start(self, condition: Condition, seeds: Tensor, sampling: Sampling) -> _Small:
        rows, columns = self.model.grid
        method = "gumbel" if rows * columns >= _WINDOW else "ar"
        drawn = decode(self.model, condition, derived(seeds, Purpose.LOW_RES), method, sampling).tokens
        low = drawn.unflatten(1, (rows, columns))
        if self.upsampler is not None:
            return _Small(self.upsampler.features(low), None, sampling)
        return _Small(None, enlarged(low, self.grid, self.vqvae.decode, self.vqvae.encode).flatten(1), sampling)

    def probs(self, state: _Small, tokens: Tensor, length: Tensor, position: Tensor) -> Tensor:
        if state.tokens is not None:
            return F.one_hot(state.tokens.gather(1, position), self.vocab).float()
        assert self.upsampler is not None and state.features is not None
        N = self.grid[0] * self.grid[1]
        known = torch.arange(N, device=tokens.device) < length[:, None]
        return to_probs(self.upsampler(state.features, tokens[:, :N], known, position), state.sampling)


def opened(low_res: Any, upsampler: Any, transformer: LlamaGenTransformer) -> dict[str, Any]:
    """The networks `low_res` and `upsampler` (None without one) of folders, checked to belong to a transformer; see
    `LlamaGenPipeline.load_low_res`."""
    found: dict[str, Path] = {"low_res": saved_network(low_res, "transformer", "low_res")}
    if upsampler is not None:
        found["upsampler"] = saved_network(upsampler, "upsampler", "upsampler")
    family = FAMILIES["LlamaGenPipeline"]
    configs = {name: check_component(folder, family.networks[name]) for name, folder in found.items()}
    check_parts(family, {"transformer": transformer.config, **configs})
    dtypes = {"low_res": transformer.dtype, "upsampler": torch.float32}
    networks: dict[str, Any] = {"upsampler": None}
    for name, folder in found.items():
        kind: Any = family.networks[name]
        networks[name] = kind.from_pretrained(folder, torch_dtype=dtypes[name], use_safetensors=True).eval()
    return networks


def enlarged(
    low: Tensor, grid: tuple[int, int], decoded: Callable[[Tensor], Tensor], encoded: Callable[[Tensor], Tensor]
) -> Tensor:
    """Tokens int64 `[B, R, C]` of a larger grid, of a picture's tokens `[B, r, c]`: decoded, resized, encoded."""
    pixels = decoded(low)
    factor = grid[0] // low.shape[1], grid[1] // low.shape[2]
    larger = F.interpolate(pixels, scale_factor=[float(each) for each in factor], mode="bicubic", align_corners=False)
    return encoded(larger.clamp(-1, 1))
