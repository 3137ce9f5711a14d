"""Evaluate a next-token model during training: its loss, and whether it uses the caption."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.device import preferred_dtype
from vargen.models.llamagen import LlamaGenTransformer
from vargen.training.augment import SamplingWeights
from vargen.training.dataset import CaptionBank, CaptionedImages
from vargen.training.token_cache import TokenStore, pad_left

_GROUPS = ("seen", "styles", "concepts", "validation")
_IMAGES = 32  # per group
_CAPTIONS = 4  # the correct one and three others
_ROWS = 32  # per pass


class NextTokenEvaluation:
    """Metrics of a model in evaluation mode; names end in the name of an image group, see `CaptionedImages.evaluation_groups`.

    `loss`: nats per token. `rank` and `gap`: of the loss of all tokens of an image, among 4 captions.
    """

    def __init__(self, data: CaptionedImages, sampling_weights: SamplingWeights, store: TokenStore, bank: CaptionBank):
        self.data, self.store, self.bank = data, store, bank
        groups = data.evaluation_groups(sampling_weights, **dict.fromkeys(_GROUPS, _IMAGES))
        self.groups = {name: (members, data.candidate_captions(members, _CAPTIONS)) for name, members in groups.items()}

    @torch.no_grad()
    def __call__(self, model: LlamaGenTransformer) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, (members, texts) in self.groups.items():
            tokens = self.store(members, [0] * len(members))
            candidates = len(texts[0])
            every = [text for captions in texts for text in captions]
            nats, _ = self._token_nats(model, tokens.repeat_interleave(candidates, 0), every)
            nats = nats.sum(1).view(-1, candidates)
            metrics[f"loss_{name}"] = nats[:, 0].mean().item() / tokens.shape[1]
            if candidates > 1:
                metrics |= {f"{metric}_{name}": value for metric, value in caption_ranking(nats).items()}
        return metrics

    @torch.no_grad()
    def validation_loss(self, model: LlamaGenTransformer, indices: np.ndarray) -> dict[str, float]:
        """Return `held_out_loss` and `entropy` in nats per token on images `indices`, each with its first caption."""
        members = indices.tolist()
        texts = [self.data.captions(i)[0] for i in members]
        loss, entropy = self._token_nats(model, self.store(members, [0] * len(members)), texts)
        return {"held_out_loss": loss.mean().item(), "entropy": entropy.mean().item()}

    def _token_nats(self, model: LlamaGenTransformer, tokens: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the nats of each token and the entropy at each position, both `[n, N]`."""
        device = tokens.device
        nats, entropies = [], []
        for start in range(0, len(texts), _ROWS):
            part = slice(start, start + _ROWS)
            with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
                logits = model(tokens[part], pad_left(self.bank(texts[part]))).logits
            nats.append(F.cross_entropy(logits.mT, tokens[part], reduction="none"))
            log_probs = logits.log_softmax(-1)
            entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        return torch.cat(nats), torch.cat(entropies)


def caption_ranking(nats: Tensor) -> dict[str, float]:
    """Compare the nats of images under candidate captions `[n, candidates]`, the correct one first.

    `rank`: share of images whose own caption is the most likely. `gap`: mean difference in nats between the other captions and
    the image's own.
    """
    best = nats[:, :1] <= nats[:, 1:].amin(1, keepdim=True)
    return {"rank": best.float().mean().item(), "gap": (nats[:, 1:].mean() - nats[:, 0].mean()).item()}
