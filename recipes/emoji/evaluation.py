"""Caption recall: the packaged scorer searches for the prompt of a generated image among 1,000 captions.

Recall decides when training stops: validation loss shows how well unseen images are predicted, but prompts mostly ask for known
concepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.emoji.captions import captions, captions_without_style
from recipes.emoji.dataset import EmojiDataset
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.scoring.image_text import ImageTextScorer
from vargen.training.augment import SamplingWeights
from vargen.training.dataset import CaptionBank, take_evenly
from vargen.training.next_token import ImageMetrics, NextTokenConfig

COUNTS = {"seen": 256, "styles": 128, "concepts": 64}
NUM_CANDIDATES = 1000
DEFAULTS = {"guidance_scale": 1.25, "temperature": 1.0, "top_k": 500, "top_p": 0.6}  # of sampling

Metrics = Callable[[int | None], dict[str, float]]
GenerateFn = Callable[[Sequence[str], int], Tensor]  # maps prompts and a seed to images [N, 3, Y, X] in [0, 1]


class CaptionRecall:
    """Measures how often a scorer ranks an image's caption first, or among the first five, of `num_candidates` captions.

    The groups are those of `EmojiDataset.evaluation_groups`: 256 training captions, 128 held-out styles, 64 held-out concepts.
    Prompts name their style; the candidate captions do not.

    Args:
        sampling_weights: how often training sees each kind of image. scorer: ranks the captions.
        counts: number of images per group.
    """

    def __init__(
        self,
        data: EmojiDataset,
        sampling_weights: SamplingWeights,
        scorer: ImageTextScorer,
        counts: dict[str, int] | None = None,
        num_candidates: int = NUM_CANDIDATES,
    ):
        self.scorer, records = scorer, data.records
        groups = data.evaluation_groups(sampling_weights, **(counts or COUNTS))
        name = {i: captions_without_style(records[i])[0] for members in groups.values() for i in members}
        every = list(dict.fromkeys(captions_without_style(record)[0] for record in records if not record["skin_tone"]))
        prompts = list(dict.fromkeys(name.values()))
        rest = [text for text in every if text not in set(prompts)]
        self.captions = prompts + take_evenly(rest, max(0, num_candidates - len(prompts)))
        place = {text: n for n, text in enumerate(self.captions)}
        self.groups = {
            group: [(i, captions(records[i])[0], place[name[i]]) for i in members] for group, members in groups.items()
        }
        self.features = scorer.embed_captions(self.captions)

    def __call__(
        self, generate_fn: GenerateFn, num_images: int | None = None, seed: int = 0, batch_size: int = 32
    ) -> dict[str, float]:
        """Return `top1_` and `top5_` of each group.

        Args:
            num_images: approximate number of images to generate, in the groups' proportions; None for all.
        """
        total = sum(map(len, self.groups.values()))
        fraction = 1.0 if num_images is None else min(1.0, num_images / total)
        metrics = {}
        for group, members in self.groups.items():
            some = take_evenly(members, max(1, round(fraction * len(members))))
            ranks = []
            for start in range(0, len(some), batch_size):
                part = some[start : start + batch_size]
                images = generate_fn([prompt for _, prompt, _ in part], seed + start)
                ranks.append(self.ranks(images, [right for _, _, right in part]))
            rank = torch.cat(ranks)
            metrics[f"top1_{group}"] = (rank < 1).float().mean().item()
            metrics[f"top5_{group}"] = (rank < 5).float().mean().item()
        return metrics

    @torch.no_grad()
    def ranks(self, images_BCYX: Tensor, right: Sequence[int]) -> Tensor:
        """Return how many captions score higher than the right one, `[B]`, for images in [0, 1]."""
        scores = self.scorer.embed_images(images_BCYX) @ self.features.T
        right_score = scores.gather(1, torch.tensor(right, device=scores.device)[:, None])
        return (scores > right_score).sum(1).cpu()


def make_generate_fn(pipe: Any, **settings: Any) -> GenerateFn:
    """Return a function that generates with a pipeline, each image from its own generator.

    Args:
        settings: of the call, such as `guidance_scale`; by default the pipeline's.
    """

    def generate(prompts: Sequence[str], seed: int) -> Tensor:
        generators = [torch.Generator().manual_seed(seed + n) for n in range(len(prompts))]
        return pipe(list(prompts), generator=generators, output_type="pt", accelerator=pipe.baseline, **settings).images.float()

    return generate


def caption_recall(data: EmojiDataset, config: NextTokenConfig, device: torch.device) -> ImageMetrics:
    """Return the `image_metrics` of `train_next_token` that measure `CaptionRecall`."""

    def prepare(vqvae: VQModel, transformer: LlamaGenTransformer, bank: CaptionBank) -> Metrics:
        recall = CaptionRecall(data, config.sampling_weights, ImageTextScorer(device=device))
        pipe = LlamaGenPipeline(
            vqvae=vqvae,
            transformer=transformer,
            text_encoder=bank.encoder,
            tokenizer=bank.tokenizer,
            defaults={**DEFAULTS, "top_k": min(DEFAULTS["top_k"], transformer.config.vocab_size)},
        )
        pipe.set_progress_bar_config(disable=True)
        generate_fn = make_generate_fn(pipe)
        return lambda num_images: recall(generate_fn, num_images)

    return prepare


def load_pipeline(model: str, transformer: Path | None = None) -> Any:
    """Load a pipeline in float32 on the CPU, without progress bars.

    Args:
        model: a packaged model or a folder. transformer: a saved transformer that replaces the model's own.

    Raises:
        ValueError: if the components are not compatible.
    """
    from vargen.pipelines.registry import inspect_model, pipeline_class

    kind = pipeline_class(inspect_model(model).pipeline)
    network = kind.family.components["transformer"].network_class
    parts = {"transformer": network.from_pretrained(transformer).eval()} if transformer else {}
    pipe = kind.from_pretrained(model, torch_dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe
