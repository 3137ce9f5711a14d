"""Do people get what they ask for? The packaged scorer looks for the caption of a drawn picture among 1,000.

This is what training stops by: held-out loss says how well unseen pictures are predicted, and people ask for known things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset, captions
from recipes.emoji.scorer_captions import without_style
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.scoring.image_text import ImageTextScorer
from vargen.training.caption_bank import CaptionBank
from vargen.training.config import NextTokenConfig
from vargen.training.dataset import spread
from vargen.training.focus import Focus
from vargen.training.next_token import ImageMetrics

COUNTS = {"seen": 256, "styles": 128, "concepts": 64}
AMONG = 1000
DEFAULTS = {"guidance_scale": 1.25, "temperature": 1.0, "top_k": 500, "top_p": 0.6}  # of sampling

Metrics = Callable[[int | None], dict[str, float]]
Draw = Callable[[Sequence[str], int], Tensor]  # prompts and a seed to pictures [N, 3, Y, X] in [0, 1]


class Recall:
    """Share of drawn pictures whose caption the scorer finds first, or among the first five, of `AMONG` captions.

    Groups are those of `EmojiDataset.evaluation_groups`: 256 training captions, 128 held-out styles, 64 held-out concepts.
    Prompts name their style; the captions that they are looked for among do not.

    Args:
        focus: which kinds training sees most. scorer: judges. counts: pictures of each group.
    """

    def __init__(
        self,
        data: EmojiDataset,
        focus: Focus,
        scorer: ImageTextScorer,
        counts: dict[str, int] | None = None,
        among: int = AMONG,
    ):
        self.scorer, records = scorer, data.records
        groups = data.evaluation_groups(focus, **(counts or COUNTS))
        name = {i: without_style(records[i])[0] for members in groups.values() for i in members}
        every = list(dict.fromkeys(without_style(record)[0] for record in records if not record["skin_tone"]))
        asked = list(dict.fromkeys(name.values()))
        others = spread(range(len(every)), len(every))
        rest = [every[n] for n in others if every[n] not in set(asked)]
        self.captions = asked + [rest[n] for n in spread(range(len(rest)), max(0, among - len(asked)))]
        place = {text: n for n, text in enumerate(self.captions)}
        self.groups = {
            group: [(i, captions(records[i])[0], place[name[i]]) for i in members] for group, members in groups.items()
        }
        self.features = scorer.embed_captions(self.captions)

    def __call__(self, draw: Draw, pictures: int | None = None, seed: int = 0, batch: int = 32) -> dict[str, float]:
        """`top1_` and `top5_` of each group.

        Args:
            pictures: about how many are drawn in all, in the groups' proportions; None for all.
        """
        total = sum(map(len, self.groups.values()))
        share = 1.0 if pictures is None else min(1.0, pictures / total)
        figures = {}
        for group, members in self.groups.items():
            some = [members[n] for n in spread(range(len(members)), max(1, round(share * len(members))))]
            ranks = []
            for start in range(0, len(some), batch):
                part = some[start : start + batch]
                images = draw([prompt for _, prompt, _ in part], seed + start)
                ranks.append(self.ranks(images, [right for _, _, right in part]))
            found = torch.cat(ranks)
            figures[f"top1_{group}"] = (found < 1).float().mean().item()
            figures[f"top5_{group}"] = (found < 5).float().mean().item()
        return figures

    @torch.no_grad()
    def ranks(self, images_BCYX: Tensor, right: Sequence[int]) -> Tensor:
        """How many captions fit a picture in [0, 1] better than the right one, `[B]`."""
        fits = self.scorer.embed_images(images_BCYX) @ self.features.T
        own = fits.gather(1, torch.tensor(right, device=fits.device)[:, None])
        return (fits > own).sum(1).cpu()


def pipeline_draw(pipe: Any, **settings: Any) -> Draw:
    """Draws with a pipeline, each picture from a generator of its own.

    Args:
        settings: of the call, such as `guidance_scale`; the pipeline's defaults where none are given.
    """

    def draw(prompts: Sequence[str], seed: int) -> Tensor:
        generators = [torch.Generator().manual_seed(seed + n) for n in range(len(prompts))]
        return pipe(list(prompts), generator=generators, output_type="pt", accelerator=pipe.baseline, **settings).images.float()

    return draw


def caption_recall(data: EmojiDataset, recipe: NextTokenConfig, device: torch.device) -> ImageMetrics:
    """`Recall` of what a generator in training draws, for `train_next_token`."""

    def prepare(vqvae: VQModel, transformer: LlamaGenTransformer, bank: CaptionBank) -> Metrics:
        recall = Recall(data, recipe.focus, ImageTextScorer(device=device))
        pipe = LlamaGenPipeline(
            vqvae=vqvae,
            transformer=transformer,
            text_encoder=bank.encoder,
            tokenizer=bank.tokenizer,
            defaults={**DEFAULTS, "top_k": min(DEFAULTS["top_k"], transformer.config.vocab_size)},
        )
        pipe.set_progress_bar_config(disable=True)
        draw = pipeline_draw(pipe)
        return lambda count: recall(draw, count)

    return prepare


def open_pipeline(model: str, transformer: Path | None = None) -> Any:
    """A pipeline in float32 on the CPU, quiet.

    Args:
        model: packaged, or a folder. transformer: a saved transformer in the place of the model's own, as training leaves it.

    Raises:
        ValueError: where parts do not belong together.
    """
    from vargen.pipelines.registry import describe, pipeline_class

    kind = pipeline_class(describe(model).pipeline)
    parts = {"transformer": LlamaGenTransformer.from_pretrained(transformer).eval()} if transformer else {}
    pipe = kind.from_pretrained(model, torch_dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe
