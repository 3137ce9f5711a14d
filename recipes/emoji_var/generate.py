"""Evaluate a next-scale model in training: its loss, whether it uses the caption, and images it generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.data import LatentStore, SelfCorrection
from recipes.emoji_var.tokenizer_evaluation import save_rows
from vargen.decoding import Sampling
from vargen.decoding.sampling import to_probs
from vargen.device import preferred_dtype
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.augment import SamplingWeights
from vargen.training.dataset import CaptionBank
from vargen.training.next_token_evaluation import caption_ranking

_CAPTIONS = 16  # the correct one and fifteen others
_ROWS = 128  # per pass
# Prompts of a sample sheet: kinds of objects that the data has, colors that it lacks, and all styles.
SHEET = (
    "a red apple, 3d style", "a blue apple, 3d style", "a carrot, flat style", "a hamburger, noto style",
    "a red heart, flat style", "grinning face, 3d style", "angry face, flat style", "a police officer, flat style",
    "a cat face, 3d style", "a pig face, 3d style", "a dolphin, flat style", "a red car, noto style",
    "a basketball, 3d style", "a yellow star", "a house, twemoji style", "flag of japan, flat style",
)  # fmt: skip


@dataclass
class Group:
    """Images of one kind: `inputs [n, T - 1, C]`, `targets [n, T]` of all scales, candidate `texts`, the right one first."""

    inputs: Tensor
    targets: Tensor
    texts: list[list[str]]


class NextScaleEvaluation:
    """Metrics of a model on images that are encoded once; names end in `_seen`, `_styles` and `_concepts`.

    `loss`: nats per token, over all scales. `rank` and `gap`: of the loss at the first scales, which determine what is in an
    image, among 16 captions; see `caption_ranking`.
    """

    def __init__(
        self,
        data: EmojiDataset,
        sampling_weights: SamplingWeights,
        store: LatentStore,
        bank: CaptionBank,
        early_scales: int,
    ):
        self.bank, self.early = bank, early_scales
        encode = SelfCorrection(store.vq, 0.0)
        self.groups: dict[str, Group] = {}
        for name, members in data.evaluation_groups(sampling_weights).items():
            inputs, targets = encode(store(members, [0] * len(members)), torch.Generator())
            self.groups[name] = Group(inputs, targets, data.candidate_captions(members, _CAPTIONS))

    @torch.no_grad()
    def __call__(self, model: VARTransformer) -> dict[str, float]:
        metrics: dict[str, float] = {}
        device = model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
            for name, group in self.groups.items():
                right = [texts[0] for texts in group.texts]
                metrics[f"loss_{name}"] = self._nats(model, group.inputs, group.targets, right).mean().item()
                if len(group.texts) > 1:
                    metrics |= {f"{metric}_{name}": value for metric, value in self._ranking(model, group).items()}
        return metrics

    def _ranking(self, model: VARTransformer, group: Group) -> dict[str, float]:
        end = model.ends[self.early - 1]
        candidates = len(group.texts[0])
        inputs = group.inputs[:, : end - model.ends[0]].repeat_interleave(candidates, 0)
        targets = group.targets[:, :end].repeat_interleave(candidates, 0)
        nats = self._nats(model, inputs, targets, [text for texts in group.texts for text in texts]).sum(1)
        return caption_ranking(nats.view(-1, candidates))

    def _nats(self, model: VARTransformer, inputs: Tensor, targets: Tensor, texts: list[str]) -> Tensor:
        """Return the nats of each token, `[n, T]`."""
        nats = []
        for start in range(0, len(texts), _ROWS):
            part = slice(start, start + _ROWS)
            logits = model(inputs[part], self.bank(texts[part])).logits
            nats.append(F.cross_entropy(logits.mT, targets[part], reduction="none"))
        return torch.cat(nats)


@torch.no_grad()
def sample_tokens(
    model: VARTransformer,
    vq: MultiScaleVQModel,
    condition: Condition,
    generator: torch.Generator,
    guidance: float = 1.5,
    sampling: Sampling | None = None,
    scales: int | None = None,
) -> list[Tensor]:
    """Sample tokens int64 `[B, N]` of the first `scales`, or of all.

    Args:
        guidance: scale g of the guided logits c + g (c - u), which grows linearly over the scales from 0 to this, as in VAR.
    """
    sampling = sampling or Sampling()
    features = condition.class_labels if condition.class_labels is not None else condition.caption_embeds
    assert features is not None
    rows = condition.cat(model.null_condition(condition)) if guidance else condition
    copies = 2 if guidance else 1
    prefix = 0 if condition.caption_embeds is None else condition.caption_embeds.shape[1]
    cache = model.new_cache(copies * len(features), prefix, device=features.device)
    f_hat, tokens = vq.zero_latent(len(features)), []
    inputs: Tensor | None = None
    for k in range(scales or len(vq.scales)):
        both = None if inputs is None else inputs.repeat(copies, 1, 1)
        logits = model(both, condition=None if k else rows, cache=cache).logits
        if guidance:
            conditional, null = logits.chunk(2)
            strength = guidance * k / max(len(vq.scales) - 1, 1)
            logits = conditional + strength * (conditional - null)
        logits[..., vq.scale_codes[k] :] = float("-inf")
        probs = to_probs(logits, sampling)
        sampled = torch.multinomial(probs.flatten(0, 1).cpu(), 1, generator=generator)
        tokens.append(sampled.to(probs.device).view(probs.shape[:2]))
        f_hat, inputs = vq.next_input(f_hat, tokens[-1], k)
    return tokens


@torch.no_grad()
def save_sample_sheet(model: VARTransformer, vq: MultiScaleVQModel, bank: CaptionBank, path: Path, columns: int = 4) -> None:
    """Save a PNG of images generated for `SHEET`, always from the same random numbers."""
    tokens = sample_tokens(model, vq, bank(SHEET), torch.Generator().manual_seed(0), guidance=2.0, sampling=Sampling(top_k=300))
    save_rows(list(vq.decode(tokens).split(columns)), path)
