"""How far a next-scale model has got: what is its loss, and does it read its captions?

What a picture is of is decided at the first scales, so captions are compared there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.data import LatentStore
from recipes.emoji_var.self_correction import Corrector
from vargen.device import preferred_dtype
from vargen.models.var import VARTransformer
from vargen.training.caption_bank import CaptionBank
from vargen.training.focus import Focus
from vargen.training.next_token_evaluation import choice

_CAPTIONS = 16  # the right one and these many less one
_ROWS = 128  # of one pass


@dataclass
class Group:
    """Pictures of one kind: `inputs [n, T - 1, C]` and `targets [n, T]` of all scales; `texts`: candidates, the first right."""

    inputs: Tensor
    targets: Tensor
    texts: list[list[str]]


class Evaluation:
    """Figures of a model on pictures that are encoded once: names end in `_seen`, `_styles` and `_concepts`.

    `rank`: share of pictures whose caption is the likeliest of 16 at the first scales. `gap`: by how many nats it is likelier
    than the others on average. `loss`: nats per token, over all scales.
    """

    def __init__(self, data: EmojiDataset, focus: Focus, store: LatentStore, bank: CaptionBank, early_scales: int):
        self.bank, self.early = bank, early_scales
        exact = Corrector(store.vq, 0.0)
        self.groups: dict[str, Group] = {}
        for name, members in data.evaluation_groups(focus).items():
            inputs, targets = exact(store(members, [0] * len(members)), torch.Generator())
            self.groups[name] = Group(inputs, targets, data.candidate_captions(members, _CAPTIONS))

    @torch.no_grad()
    def __call__(self, model: VARTransformer) -> dict[str, float]:
        figures: dict[str, float] = {}
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
            for name, group in self.groups.items():
                own = [texts[0] for texts in group.texts]
                figures[f"loss_{name}"] = self._nats(model, group.inputs, group.targets, own).mean().item()
                if len(group.texts) > 1:
                    figures |= self._ranks(model, name, group)
        return figures

    def _ranks(self, model: VARTransformer, name: str, group: Group) -> dict[str, float]:
        end = model.ends[self.early - 1]
        candidates = len(group.texts[0])
        inputs = group.inputs[:, : end - model.ends[0]].repeat_interleave(candidates, 0)
        targets = group.targets[:, :end].repeat_interleave(candidates, 0)
        nats = self._nats(model, inputs, targets, [text for texts in group.texts for text in texts]).sum(1)
        nats = nats.view(-1, candidates)
        return {f"{figure}_{name}": value for figure, value in choice(nats).items()}

    def _nats(self, model: VARTransformer, inputs: Tensor, targets: Tensor, texts: list[str]) -> Tensor:
        """Of each token `[n, T]`."""
        found = []
        for start in range(0, len(texts), _ROWS):
            part = slice(start, start + _ROWS)
            logits = model(inputs[part], self.bank(texts[part])).logits
            found.append(F.cross_entropy(logits.mT, targets[part], reduction="none"))
        return torch.cat(found)
