"""Self-corrected teacher forcing: a scale is shown what earlier scales got wrong, and learns to put it right.

Source: Han et al. 2024, "Infinity" (arXiv:2412.04431), section 3.4, with wrong codes in the place of flipped bits.

Shape suffixes: B pictures, C code width, R/G latent rows and columns, s side of a scale, T tokens of the scales asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel

_NEIGHBOURS = 32


class Corrector:
    """Inputs and targets of teacher forcing whose histories hold wrong codes.

    Args:
        vq: its codes and convolutions define both.
        noise: most of a scale's codes that are wrong; the share is drawn per picture and scale, uniform from 0 to this. Half of
            them are among the nearest codes of the right one, half are right codes of elsewhere in the batch.
    """

    @torch.no_grad()
    def __init__(self, vq: MultiScaleVQModel, noise: float):
        self.vq, self.noise = vq, noise
        tables = {}
        for count in sorted(set(vq.scale_codes)):
            codes = vq.codebook[:count]
            nearest = [torch.cdist(part, codes).topk(min(_NEIGHBOURS + 1, count), largest=False) for part in codes.split(1024)]
            table = torch.cat([indices for _, indices in nearest])
            tables[count] = table[:, 1:] if count > 1 else table
        self.near = [tables[count] for count in vq.scale_codes]

    @torch.no_grad()
    def __call__(self, latents_BCRG: Tensor, draw: torch.Generator, scales: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs of scales 1 on `[B, T - 1, C]`, and targets int64 `[B, T]`, of the first `scales`.

        Args:
            draw: on the CPU, where all randomness comes from.
        """
        quantize, count = self.vq.quantize, scales or len(self.vq.scales)
        f_hat = torch.zeros_like(latents_BCRG)
        inputs, targets = [], []
        for k in range(count):
            target = quantize.nearest(quantize.shrink(latents_BCRG - f_hat, k), k)
            targets.append(target.flatten(1))
            if k + 1 < count:
                f_hat = f_hat + quantize.lookup(self.wrong(target, k, draw), k)
                inputs.append(quantize.shrink(f_hat, k + 1).flatten(2).mT)
        joined = torch.cat(inputs, 1) if inputs else latents_BCRG.new_zeros(len(latents_BCRG), 0, latents_BCRG.shape[1])
        return joined, torch.cat(targets, 1)

    def wrong(self, tokens_Bss: Tensor, k: int, draw: torch.Generator) -> Tensor:
        """Tokens of scale k with a share replaced."""
        if not self.noise:
            return tokens_Bss
        B, device = len(tokens_Bss), tokens_Bss.device
        share = torch.rand(B, 1, 1, generator=draw) * self.noise
        chance = torch.rand(tokens_Bss.shape, generator=draw)
        near = self.near[k]
        which = torch.randint(near.shape[1], tokens_Bss.shape, generator=draw).to(device)
        others = tokens_Bss.flatten()[torch.randperm(tokens_Bss.numel(), generator=draw).to(device)].view_as(tokens_Bss)
        close = near.to(device)[tokens_Bss, which]
        replaced = torch.where((chance < share / 2).to(device), close, others)
        return torch.where((chance < share).to(device), replaced, tokens_Bss)
