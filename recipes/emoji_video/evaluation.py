"""How far a video model has got: does it know its clips, and do drawn ones move as much as real ones?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.captions import captions
from recipes.emoji_video.autoencoder import to_video, write_strips
from recipes.emoji_video.batches import NO_CAPTION, text_of
from recipes.emoji_video.clips import VideoDataset, motion_weights
from recipes.emoji_video.config import VideoConfig
from recipes.emoji_video.generate import draw_latents
from recipes.emoji_video.losses import drawing
from vargen.decoding.video.denoising import TIMESTEPS, add_noise
from vargen.device import preferred_dtype
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.caption_bank import CaptionBank

_SEEN, _HELD_OUT = 16, 8  # clips that are drawn
_SCORED = 16  # clips of each group whose loss is measured
_LEVELS = (0.25, 0.5, 0.75, 0.95)
_FROZEN = 0.2  # of the real motion


class Evaluation:
    """Figures of a model, always from the same random numbers.

    `loss_seen`, `loss_held_out`: squared error of the velocity of noisy blocks behind clean ones. Of drawn clips of training
    captions: `motion`, the median over clips of how much they move, to the real clip; `frozen`, the share that moves less than
    a fifth of it; `recall`, PSNR in dB of the first frame to the real one; `held_out_motion` is that of held-out captions.
    """

    def __init__(
        self,
        data: VideoDataset,
        latents: np.ndarray,
        vae: CausalVideoVAE,
        bank: CaptionBank,
        recipe: VideoConfig,
        device: torch.device,
    ):
        self.data, self.latents, self.vae, self.bank, self.recipe, self.device = data, latents, vae, bank, recipe, device
        moving = motion_weights(data.records) > 0
        train = [i for i in data.indices("train") if moving[i]]
        self.groups = {"seen": _spread(train, _SCORED), "held_out": _spread(list(data.indices("validation")), _SCORED)}

    @torch.no_grad()
    def __call__(self, model: CausalVideoTransformer, sheet: Path | None = None) -> dict[str, float]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16):
            return self.figures(model, sheet)

    def figures(self, model: CausalVideoTransformer, sheet: Path | None) -> dict[str, float]:
        figures = {f"loss_{name}": self.loss(model, chosen) for name, chosen in self.groups.items() if chosen}
        rows: list[Tensor] = []
        for name, count in (("seen", _SEEN), ("held_out", _HELD_OUT)):
            chosen = _spread(self.groups[name], count)
            if not chosen:
                continue
            real, drawn = to_video(self.data.frames[chosen], self.device), self.drawn(model, chosen)
            rows += list(drawn)
            ratios = drawn.diff(dim=1).abs().mean((1, 2, 3, 4)) / real.diff(dim=1).abs().mean((1, 2, 3, 4)).clamp_min(1e-6)
            if name == "held_out":
                figures["held_out_motion"] = ratios.median().item()
                continue
            missed = ((drawn[:, 0] - real[:, 0]) / 2).square().mean((1, 2, 3)).clamp_min(1e-10)
            figures |= {"motion": ratios.median().item(), "frozen": (ratios < _FROZEN).float().mean().item()}
            figures["recall"] = (-10 * missed.log10()).mean().item()
        if sheet is not None and rows:
            write_strips([row[::2] for row in rows], sheet)
        return figures

    def caption(self, index: int) -> str:
        return captions(self.data.records[index])[0]

    def loss(self, model: CausalVideoTransformer, chosen: list[int]) -> float:
        clean = torch.from_numpy(self.latents[chosen].astype(np.float32)).to(self.device)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).to(clean)
        text = text_of(model, self.bank, [self.caption(i) for i in chosen])
        found = []
        for level in _LEVELS:
            steps = torch.full((len(clean),), level * TIMESTEPS, device=self.device)
            velocity = model(add_noise(clean, noise, level), steps, text, context=clean).float()
            found.append((velocity - (noise - clean)).square().mean())
        return torch.stack(found).mean().item()

    def drawn(self, model: CausalVideoTransformer, chosen: list[int]) -> Tensor:
        """Frames `[B, F, 3, Y, X]` in [-1, 1]."""
        how = drawing(self.recipe)
        text = text_of(model, self.bank, [self.caption(i) for i in chosen])
        null = text_of(model, self.bank, [NO_CAPTION] * len(chosen))
        blocks = self.latents.shape[1] // model.geometry.block_frames
        latents = draw_latents(model, text, blocks, seed=1, null=null, **how)  # type: ignore[arg-type]
        return self.vae.decode(latents).clamp(-1, 1)


def _spread(items: list[int], count: int) -> list[int]:
    """About `count` of them, evenly."""
    return [int(i) for i in items[:: max(1, len(items) // count)][:count]]
