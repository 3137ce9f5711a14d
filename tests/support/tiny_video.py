"""A small and a large video model over the same latents, and their decoders: random weights, small latents, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from vargen.decoding import BlockRecord, BlockStream, BlockView, VideoMethod, decode_video
from vargen.decoding.video.denoising import shifted_levels
from vargen.decoding.video.policies import Policy
from vargen.models.causal_video.decoding import CausalVideoBlockModel
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.guidance import Condition
from vargen.models.tokenizers.video_vae import CausalVideoVAE, PreviewDecoder

SHAPE = {
    "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 4, "height": 2, "width": 2, "patch": 1,
    "block_frames": 2, "spatial_stride": 8, "temporal_stride": 1, "fps": 12, "text_dim": 8, "text_len": None,
    "text_mask": True, "freq_dim": 16,
}  # fmt: skip
LEVELS = shifted_levels()


@dataclass(frozen=True)
class Placed(Policy):
    """Generates each block as it is told: `"d"` by the small model, others and later ones by the target."""

    makers: str

    def should_draft(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        return self.makers[record.number : record.number + 1] == "d"


def randomised(network: torch.nn.Module, seed: int, scale: float = 0.3) -> torch.nn.Module:
    """With every weight drawn: networks that start as the identity would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = scale if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return network.eval().requires_grad_(False)


@cache
def transformer(seed: int = 0, **changes) -> CausalVideoTransformer:
    return randomised(CausalVideoTransformer(**{**SHAPE, **changes}), seed)


@cache
def vae() -> CausalVideoVAE:
    return randomised(CausalVideoVAE(size=16, widths=(8, 16, 32), conv_blocks=1, transformer_blocks=2), 3, 0.2)


@cache
def preview() -> PreviewDecoder:
    return randomised(PreviewDecoder(4, (16, 8), 4), 4)


def models(window: int | None = None, sinks: int = 0, **options) -> CausalVideoBlockModel:
    """A target of two layers, and a drafter of one."""
    options = {"window": window, "sinks": sinks, **options}
    small = CausalVideoBlockModel(transformer(1, dim=12, num_heads=1, num_layers=1), LEVELS, **options)
    return CausalVideoBlockModel(transformer(0), LEVELS, draft_model=small, **options)


def condition(seed: int = 0) -> Condition:
    embeds = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(seed))
    return Condition(caption_embeds=embeds, caption_mask=torch.ones(1, 5, dtype=torch.bool))


def varied(view: BlockView) -> torch.Tensor:
    """Scores [2] in (0, 1) that differ from block to block."""
    return torch.rand(2, generator=torch.Generator().manual_seed(view.number))


def stream(method: str | VideoMethod, blocks: int = 5, model: CausalVideoBlockModel | None = None, **options) -> BlockStream:
    given = {"decoder": vae(), "score": varied, **options}
    return decode_video(model or models(), condition(), given.pop("seed", 7), method, blocks=blocks, **given)


def video(made: BlockStream) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and frames of all blocks."""
    blocks = list(made)
    return torch.cat([block.latents for block in blocks]), torch.cat([block.frames for block in blocks])
