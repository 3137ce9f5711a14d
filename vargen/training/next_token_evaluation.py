"""Evaluate a next-token model during training: its loss, and whether it uses the caption."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.device import preferred_dtype
from vargen.models.llamagen import LlamaGenTransformer
from vargen.training.caption_bank import CaptionBank
from vargen.training.dataset import CaptionedImages
from vargen.training.focus import Focus
from vargen.training.token_cache import TokenStore, left_padded

_PICTURES = 32  # per group
_CAPTIONS = 4  # the correct one and three others
_ROWS = 32  # per pass


class Evaluation:
    """Metrics of a model in evaluation mode; names end in the name of an image group, see `CaptionedImages.evaluation_groups`.

    `loss`: nats per token. `rank` and `gap`: of the loss of all tokens of an image, among 4 captions.
    """

    def __init__(self, data: CaptionedImages, focus: Focus, store: TokenStore, bank: CaptionBank):
        self.data, self.store, self.bank = data, store, bank
        groups = data.evaluation_groups(focus, seen=_PICTURES, styles=_PICTURES, concepts=_PICTURES, validation=_PICTURES)
        self.groups = {name: (members, data.candidate_captions(members, _CAPTIONS)) for name, members in groups.items()}

    @torch.no_grad()
    def __call__(self, model: LlamaGenTransformer) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name, (members, texts) in self.groups.items():
            tokens = self.store(members, [0] * len(members))
            candidates = len(texts[0])
            nats, _ = self._told(model, tokens.repeat_interleave(candidates, 0), [text for own in texts for text in own])
            told = nats.sum(1).view(-1, candidates)
            figures[f"loss_{name}"] = told[:, 0].mean().item() / tokens.shape[1]
            if candidates > 1:
                figures |= {f"{figure}_{name}": value for figure, value in choice(told).items()}
        return figures

    @torch.no_grad()
    def held_out(self, model: LlamaGenTransformer, indices: np.ndarray) -> dict[str, float]:
        """Return `held_out_loss` and `entropy` in nats per token on images `indices`, each with its first caption."""
        chosen = indices.tolist()
        texts = [self.data.captions(i)[0] for i in chosen]
        loss, entropy = self._told(model, self.store(chosen, [0] * len(chosen)), texts)
        return {"held_out_loss": loss.mean().item(), "entropy": entropy.mean().item()}

    def _told(self, model: LlamaGenTransformer, tokens: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the nats of each token and the entropy at each position, both `[n, N]`."""
        device = tokens.device
        nats, entropies = [], []
        for start in range(0, len(texts), _ROWS):
            part = slice(start, start + _ROWS)
            with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
                logits = model(tokens[part], left_padded(self.bank(texts[part]))).logits
            nats.append(F.cross_entropy(logits.mT, tokens[part], reduction="none"))
            log_probs = logits.log_softmax(-1)
            entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        return torch.cat(nats), torch.cat(entropies)


def choice(nats: Tensor) -> dict[str, float]:
    """Compare the nats of images under candidate captions `[n, candidates]`, the correct one first.

    `rank`: share of images whose own caption is the most likely. `gap`: mean difference in nats between the other captions and
    the image's own.
    """
    best = nats[:, :1] <= nats[:, 1:].amin(1, keepdim=True)
    return {"rank": best.float().mean().item(), "gap": (nats[:, 1:].mean() - nats[:, 0].mean()).item()}
