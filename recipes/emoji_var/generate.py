"""Draw with a next-scale model while it is trained: pictures to look at, and histories for a student."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vargen.decoding import Sampling
from vargen.decoding.sampling import to_probs
from vargen.files import atomic_file
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.caption_bank import CaptionBank

# What a sheet shows, from the left, row by row: kinds of things that the data has, colours it has not, and all styles.
SHEET = (
    "a red apple, 3d style", "a blue apple, 3d style", "a carrot, flat style", "a hamburger, noto style",
    "a red heart, flat style", "grinning face, 3d style", "angry face, flat style", "a police officer, flat style",
    "a cat face, 3d style", "a pig face, 3d style", "a dolphin, flat style", "a red car, noto style",
    "a basketball, 3d style", "a yellow star", "a house, twemoji style", "flag of japan, flat style",
)  # fmt: skip


@torch.no_grad()
def draw_tokens(
    model: VARTransformer,
    vq: MultiScaleVQModel,
    condition: Condition,
    generator: torch.Generator,
    guidance: float = 1.5,
    sampling: Sampling | None = None,
    scales: int | None = None,
) -> list[Tensor]:
    """Tokens int64 `[B, N]` of the first `scales`, or of all.

    Args:
        guidance: of logits c + g (c - u), where g grows linearly over the scales from 0 to this, as VAR has it.
    """
    sampling = sampling or Sampling()
    given = condition.class_labels if condition.class_labels is not None else condition.caption_embeds
    assert given is not None
    rows = condition.join(model.null_condition(condition)) if guidance else condition
    copies = 2 if guidance else 1
    prefix = 0 if condition.caption_embeds is None else condition.caption_embeds.shape[1]
    cache = model.new_cache(copies * len(given), prefix, device=given.device)
    f_hat, tokens = vq.empty_latent(len(given)), []
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
        drawn = torch.multinomial(probs.flatten(0, 1).cpu(), 1, generator=generator)
        tokens.append(drawn.to(probs.device).view(probs.shape[:2]))
        f_hat, inputs = vq.next_input(f_hat, tokens[-1], k)
    return tokens


@torch.no_grad()
def draw_sheet(model: VARTransformer, vq: MultiScaleVQModel, bank: CaptionBank, path: Path, columns: int = 4) -> None:
    """A PNG of what the model draws for `SHEET`, always from the same random numbers."""
    tokens = draw_tokens(model, vq, bank(SHEET), torch.Generator().manual_seed(0), guidance=2.0, sampling=Sampling(top_k=300))
    pixels = vq.decode(tokens).float()
    rows = [torch.cat(list(row), dim=-1) for row in pixels.split(columns)]
    values = ((torch.cat(rows, dim=-2) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    with atomic_file(path) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")
