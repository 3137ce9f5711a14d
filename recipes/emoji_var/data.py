"""Training data of a next-scale model: latents and caption features, each computed once, and inputs with wrong codes.

Shape suffixes: B images, C latent channels, R/G latent rows and columns, P caption tokens, s side of a scale, T tokens of the
requested scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training.dataset import CaptionBank
from vargen.training.variants import AugmentedBatches, EncodedVariants
from vargen.weight_files import weights_digest

if TYPE_CHECKING:
    from recipes.emoji_var.transformer import NextScaleConfig

_NEIGHBORS = 32


def hash_encoder(vq: MultiScaleVQModel) -> str:
    """Return a digest of everything that determines the latents."""
    return weights_digest(vq.encoder, vq.quant_conv)


def validate_same_encoder(run: Path, vq: MultiScaleVQModel, tokenizer: Path) -> None:
    """Raise ValueError if a `run` stored latents of an encoder other than `tokenizer`'s."""
    cached = [file.name for file in run.glob("latents-*.npy")]
    if cached and not any(name.startswith(f"latents-{hash_encoder(vq)}-") for name in cached):
        raise ValueError(f"{run} was trained on the latents of another tokenizer than {tokenizer}; give that one")


class LatentStore(EncodedVariants):
    """Encoder latents of image variants, stored as float16 `[N, variants, C, R, G]`."""

    def __init__(self, folder: Path, images: np.ndarray, vq: MultiScaleVQModel, config: NextScaleConfig, device: torch.device):
        self.vq = vq
        shape = (vq.config.codebook_embed_dim, vq.scales[-1], vq.scales[-1])
        super().__init__(folder, "latents", hash_encoder(vq), images, config, device, shape, np.float16)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        return self.vq.encode_latent(pixels_BCYX).float().cpu().numpy()

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> Tensor:
        """Return float32 `[B, C, R, G]`."""
        return torch.from_numpy(self.load(indices, variants).astype(np.float32)).to(self.device)


@dataclass(frozen=True)
class LatentBatch:
    """`latents [B, C, R, G]`, their captions `texts`, and the captions' `condition`, some of which are dropped."""

    latents: Tensor
    condition: Condition
    texts: list[str]


class LatentBatches:
    """Latents and captions of a step, as a function of (seed, step); see `AugmentedBatches`."""

    def __init__(self, data: EmojiDataset, store: LatentStore, bank: CaptionBank, config: NextScaleConfig):
        self.augmented, self.store, self.bank = AugmentedBatches(data, store, config), store, bank

    def __call__(self, step: int, count: int, stream: int = 0) -> LatentBatch:
        """Return `count` images.

        Args:
            stream: distinguishes several batches of one step.
        """
        indices, variants, texts, dropped = self.augmented(step, count, stream)
        condition = self.bank(texts)
        assert condition.caption_mask is not None
        keep = ~dropped.to(condition.caption_mask.device)
        condition = Condition(caption_embeds=condition.caption_embeds, caption_mask=condition.caption_mask & keep[:, None])
        return LatentBatch(self.store(indices, variants), condition, texts)


class SelfCorrection:
    """Inputs and targets of teacher forcing with wrong codes: a scale learns to correct the errors of earlier scales.

    Source: Han et al. 2024, "Infinity" (arXiv:2412.04431), section 3.4, with wrong codes instead of flipped bits.

    Args:
        vq: its codes and convolutions determine both.
        noise: maximum fraction of a scale's codes that are wrong; uniform from 0 to this, per image and scale. Half of them are
            among the nearest codes of the right one, half are right codes of other places in the batch.
    """

    @torch.no_grad()
    def __init__(self, vq: MultiScaleVQModel, noise: float):
        self.vq, self.noise = vq, noise
        tables = {}
        for count in sorted(set(vq.scale_codes)):
            codes = vq.codebook[:count]
            nearest = [torch.cdist(part, codes).topk(min(_NEIGHBORS + 1, count), largest=False) for part in codes.split(1024)]
            table = torch.cat([indices for _, indices in nearest])
            tables[count] = table[:, 1:] if count > 1 else table
        self.near = [tables[count] for count in vq.scale_codes]

    @torch.no_grad()
    def __call__(self, latents_BCRG: Tensor, generator: torch.Generator, scales: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs of all scales but the first, `[B, T - 1, C]`, and the targets int64 `[B, T]`.

        Args:
            generator: on the CPU, the source of all randomness. scales: number of first scales; all by default.
        """
        quantize, count = self.vq.quantize, scales or len(self.vq.scales)
        f_hat = torch.zeros_like(latents_BCRG)
        inputs, targets = [], []
        for k in range(count):
            target = quantize.find_nearest(quantize.downsample(latents_BCRG - f_hat, k), k)
            targets.append(target.flatten(1))
            if k + 1 < count:
                f_hat = f_hat + quantize.lookup(self.corrupt(target, k, generator), k)
                inputs.append(quantize.downsample(f_hat, k + 1).flatten(2).mT)
        joined = torch.cat(inputs, 1) if inputs else latents_BCRG.new_zeros(len(latents_BCRG), 0, latents_BCRG.shape[1])
        return joined, torch.cat(targets, 1)

    def corrupt(self, tokens_Bss: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """Replace a fraction of the tokens of scale k."""
        if not self.noise:
            return tokens_Bss
        B, device = len(tokens_Bss), tokens_Bss.device
        fraction = torch.rand(B, 1, 1, generator=generator) * self.noise
        uniforms = torch.rand(tokens_Bss.shape, generator=generator)
        near = self.near[k]
        which = torch.randint(near.shape[1], tokens_Bss.shape, generator=generator).to(device)
        order = torch.randperm(tokens_Bss.numel(), generator=generator).to(device)
        others = tokens_Bss.flatten()[order].view_as(tokens_Bss)
        similar = near.to(device)[tokens_Bss, which]
        replaced = torch.where((uniforms < fraction / 2).to(device), similar, others)
        return torch.where((uniforms < fraction).to(device), replaced, tokens_Bss)
