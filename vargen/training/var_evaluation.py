"""How far a next-scale model has got: does a picture fit its caption better than others, and what is its loss?

Losses of all tokens hardly tell: most of them are texture. What a picture is of is decided at the first scales, so there each
picture's likelihood under its own caption is compared with that under captions of other pictures, in the same style.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.device import fast_dtype
from vargen.models.var import VARTransformer
from vargen.training.emoji import EmojiDataset, captions, is_held_out_cell
from vargen.training.self_correction import Corrector
from vargen.training.var_data import CaptionBank, LatentStore, looks

_PICTURES = 64
_CAPTIONS = 16  # the right one and these many less one
_ROWS = 128  # of one pass


@dataclass
class Group:
    """Pictures of one kind: `inputs [n, T - 1, C]` and `targets [n, T]` of all scales; `texts`: candidates, the first right."""

    inputs: Tensor
    targets: Tensor
    texts: list[list[str]]


def evaluation_groups(data: EmojiDataset) -> dict[str, list[int]]:
    """Pictures without skin tone, spread evenly over the data: seen in training; held-out styles of seen concepts; held out."""
    kept = [i for i, record in enumerate(data.records) if not record["skin_tone"]]
    seen = [i for i in kept if data.records[i]["split"] == "train" and looks(data.records[i]) == 1.0]
    groups = {
        "seen": [i for i in seen if not is_held_out_cell(data.records[i])],
        "styles": [i for i in kept if is_held_out_cell(data.records[i])],
        "concepts": [i for i in kept if data.records[i]["split"] == "validation"],
    }
    return {name: members[:: -(-len(members) // _PICTURES)] for name, members in groups.items() if members}


class Evaluation:
    """Figures of a model on pictures that are encoded once: names end in `_seen`, `_styles` and `_concepts`.

    `rank`: share of pictures whose caption is the likeliest of 16 at the first scales. `gap`: by how many nats it is likelier
    than the others on average. `loss`: nats per token, over all scales.
    """

    def __init__(self, data: EmojiDataset, store: LatentStore, bank: CaptionBank, early_scales: int):
        self.bank, self.early = bank, early_scales
        exact = Corrector(store.vq, 0.0)
        self.groups: dict[str, Group] = {}
        for name, members in evaluation_groups(data).items():
            inputs, targets = exact(store(members, [0] * len(members)), torch.Generator())
            texts = []
            for n, i in enumerate(members):
                step = max(1, len(members) // _CAPTIONS)
                others = [members[(n + step * j) % len(members)] for j in range(1, min(_CAPTIONS, len(members)))]
                style = data.records[i]["style"]
                texts.append([captions({**data.records[j], "style": style})[0] for j in [i, *others]])
            self.groups[name] = Group(inputs, targets, texts)

    @torch.no_grad()
    def __call__(self, model: VARTransformer) -> dict[str, float]:
        figures: dict[str, float] = {}
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16):
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
        best = nats[:, :1] <= nats[:, 1:].amin(1, keepdim=True)
        gap = nats[:, 1:].mean() - nats[:, 0].mean()
        return {f"rank_{name}": best.float().mean().item(), f"gap_{name}": gap.item()}

    def _nats(self, model: VARTransformer, inputs: Tensor, targets: Tensor, texts: list[str]) -> Tensor:
        """Of each token `[n, T]`."""
        found = []
        for start in range(0, len(texts), _ROWS):
            part = slice(start, start + _ROWS)
            logits = model(inputs[part], self.bank(texts[part])).logits
            found.append(F.cross_entropy(logits.mT, targets[part], reduction="none"))
        return torch.cat(found)
