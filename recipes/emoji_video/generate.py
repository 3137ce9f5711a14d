"""Generate with a video model in training, and evaluate it: its loss, and the motion of generated clips.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.captions import captions
from recipes.emoji_var.tokenizer_evaluation import save_rows
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.batches import EMPTY_CAPTION, encode_captions
from recipes.emoji_video.clips import VideoDataset, motion_weights
from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean, shift_level, shifted_levels
from vargen.device import preferred_dtype
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_cache import TextCache
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.dataset import CaptionBank

if TYPE_CHECKING:
    from recipes.emoji_video.lora import LoRAConfig
    from recipes.emoji_video.transformer import VideoConfig

_GENERATED = {"seen": 16, "held_out": 8}  # clips generated per group
_EVALUATED = 16  # clips per group whose loss is measured
_LEVELS = (0.25, 0.5, 0.75, 0.95)
STATIC = 0.2  # of the real motion


def euler_levels(config: VideoConfig | LoRAConfig) -> list[float]:
    """Return the noise levels of a flow's steps, from 1 down, without 0."""
    return [shift_level(1 - i / config.euler_steps, config.shift) for i in range(config.euler_steps)]


def sampling_settings(config: VideoConfig | LoRAConfig) -> dict[str, object]:
    """Return the settings of `sample_latents` for a model with this config: `levels`, `euler` and `guidance`."""
    if config.objective == "flow":
        return {"levels": euler_levels(config), "euler": True, "guidance": config.guidance}
    return {"levels": list(shifted_levels(config.levels, config.shift)), "euler": False, "guidance": 1.0}


def make_block_noise(seed: int, block: int, step: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the noise of one step of one block, float32, as a function of (seed, block, step)."""
    generator = torch.Generator().manual_seed((seed * 100_003 + block) * 101 + step)
    return torch.randn(tuple(shape), generator=generator).to(device)


@torch.no_grad()
def sample_latents(
    model: CausalVideoTransformer,
    text: TextCache,
    blocks: int,
    levels: Sequence[float],
    seed: int = 0,
    *,
    euler: bool = False,
    null: TextCache | None = None,
    guidance: float = 1.0,
    first: Tensor | None = None,
) -> Tensor:
    """Generate clean latents `[B, F, C, Y, X]` of `blocks` blocks.

    Args:
        text: of B captions. levels: noise levels of the steps, from 1 down, without 0.
        euler: follow the velocity from level to level; otherwise predict the clean latents and add new noise of the next level.
        null: of empty captions, for guidance: u + guidance (c - u).
        first: clean latents `[B, F, C, Y, X]` of the first block, to continue.
    """
    geometry, B = model.geometry, len(text.keys[0])
    device = text.keys[0].device
    guided = null is not None and guidance != 1
    both = text.cat(null) if guided and null is not None else text
    copies = 2 if guided else 1
    cache = model.new_cache(copies * B, blocks * geometry.block_frames, dtype=text.keys[0].dtype, device=device)

    def velocity(x: Tensor, level: float) -> Tensor:
        steps = torch.full((copies * B,), level * TIMESTEPS, device=device)
        v = model(x.repeat(copies, 1, 1, 1, 1), steps, both, cache).float()
        if not guided:
            return v
        conditional, unconditional = v.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    done = []
    for block in range(blocks):
        cache.begin_block()
        shape = geometry.latent_shape(B)
        x = make_block_noise(seed, block, 0, shape, device) if block or first is None else first
        for step, level in enumerate(levels if block or first is None else ()):
            v = velocity(x, level)
            following = levels[step + 1] if step + 1 < len(levels) else 0.0
            if euler:
                x = x + (following - level) * v
            else:
                x = predict_clean(x, v, level)
                if following:
                    x = add_noise(x, make_block_noise(seed, block, step + 1, shape, device), following)
        done.append(x)
        if block + 1 < blocks:
            velocity(x, 0.0)
            cache.commit()
    return torch.cat(done, 1)


class VideoEvaluation:
    """Metrics of a model, always from the same random numbers.

    `loss_seen`, `loss_held_out`: squared error of the velocity of noisy blocks after clean ones. For clips generated from
    training captions: `motion`, the median of their motion relative to the real clip; `static_fraction`, the fraction that
    moves less than a fifth of it; `recall`, PSNR in dB of the first frame relative to the real one. `held_out_motion` is the
    motion for held-out captions.
    """

    def __init__(
        self,
        data: VideoDataset,
        latents: np.ndarray,
        vae: CausalVideoVAE,
        bank: CaptionBank,
        config: VideoConfig,
        device: torch.device,
    ):
        self.data, self.latents, self.vae, self.bank, self.config, self.device = data, latents, vae, bank, config, device
        moving = motion_weights(data.records) > 0
        train = [i for i in data.indices("train") if moving[i]]
        validation = list(data.indices("validation"))
        self.groups = {"seen": _every_nth(train, _EVALUATED), "held_out": _every_nth(validation, _EVALUATED)}

    @torch.no_grad()
    def __call__(self, model: CausalVideoTransformer, sheet: Path | None = None) -> dict[str, float]:
        """Return the metrics, and save the generated clips to the PNG `sheet`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16):
            return self.metrics(model, sheet)

    def metrics(self, model: CausalVideoTransformer, sheet: Path | None) -> dict[str, float]:
        metrics = {f"loss_{name}": self.loss(model, members) for name, members in self.groups.items() if members}
        rows: list[Tensor] = []
        for name, count in _GENERATED.items():
            members = _every_nth(self.groups[name], count)
            if not members:
                continue
            real, clips = to_video(self.data.frames[members], self.device), self.generate_clips(model, members)
            rows += list(clips)
            ratios = clips.diff(dim=1).abs().mean((1, 2, 3, 4)) / real.diff(dim=1).abs().mean((1, 2, 3, 4)).clamp_min(1e-6)
            if name == "held_out":
                metrics["held_out_motion"] = ratios.median().item()
                continue
            error = ((clips[:, 0] - real[:, 0]) / 2).square().mean((1, 2, 3)).clamp_min(1e-10)
            metrics["motion"] = ratios.median().item()
            metrics["static_fraction"] = (ratios < STATIC).float().mean().item()
            metrics["recall"] = (-10 * error.log10()).mean().item()
        if sheet is not None and rows:
            save_rows([row[::2] for row in rows], sheet)
        return metrics

    def loss(self, model: CausalVideoTransformer, members: list[int]) -> float:
        """Return the squared error of the velocity of noisy blocks after clean ones, averaged over noise levels."""
        clean = torch.from_numpy(self.latents[members].astype(np.float32)).to(self.device)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).to(clean)
        text = encode_captions(model, self.bank, self._captions(members))
        errors = []
        for level in _LEVELS:
            steps = torch.full((len(clean),), level * TIMESTEPS, device=self.device)
            velocity = model(add_noise(clean, noise, level), steps, text, context=clean).float()
            errors.append((velocity - (noise - clean)).square().mean())
        return torch.stack(errors).mean().item()

    def generate_clips(self, model: CausalVideoTransformer, members: list[int]) -> Tensor:
        """Generate clips from the captions of these clips: frames `[B, F, 3, Y, X]` in [-1, 1]."""
        text = encode_captions(model, self.bank, self._captions(members))
        null = encode_captions(model, self.bank, [EMPTY_CAPTION] * len(members))
        blocks = self.latents.shape[1] // model.geometry.block_frames
        settings = sampling_settings(self.config)
        latents = sample_latents(model, text, blocks, seed=1, null=null, **settings)  # type: ignore[arg-type]
        return self.vae.decode(latents).clamp(-1, 1)

    def _captions(self, members: list[int]) -> list[str]:
        return [captions(self.data.records[i])[0] for i in members]


def _every_nth(items: list[int], count: int) -> list[int]:
    """Return at most `count` items at equal intervals."""
    return [int(i) for i in items[:: max(1, len(items) // count)][:count]]
