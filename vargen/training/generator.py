"""Train a `LlamaGenTransformer` on the tokens of captioned images, at the resolution of its grid.

`vargen train drafter low-res` trains the small one whose images are the drafts of `mulo`; `recipes/train_llamagen.py` trains a
model of one's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.guidance import Condition
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.prompts import left_pad
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionBank, CaptionedImages, take_evenly
from vargen.training.image_tokens import hash_tokens, load_or_encode
from vargen.training.run import Trainer, export, fit

_EVALUATED = 256  # validation images


@dataclass(frozen=True)
class GeneratorConfig:
    """How to train a `LlamaGenTransformer` on tokens. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.1
    max_caption_tokens: int = 16  # longer captions are truncated: one shape for all batches
    token_noise: float = 0.1  # fraction of input tokens from other images, per image uniform from 0 to this
    wrong_prefix_probability: float = 0.0  # probability that an input starts with another image's tokens
    adamw_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_caption_tokens", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "weight_decay", "adamw_learning_rate")
        validate_fractions(self, "caption_dropout", "token_noise", "wrong_prefix_probability")


def corrupt_tokens(tokens_BN: Tensor, max_noise: float, wrong_prefix: float, captioned: Tensor) -> Tensor:
    """Replace some input tokens by those of other images in the batch, at the same positions.

    Generated images contain errors that real ones lack. A model trained without errors continues any image that starts like one
    it has seen; with errors it relies less on earlier tokens and more on the caption.

    Args:
        max_noise: the share of scattered replacements is uniform from 0 to this, per image.
        wrong_prefix: probability that all tokens of an image up to a random position come from one other image.
        captioned: bool `[B]`; only these get wrong prefixes, because without a caption nothing indicates the continuation.
    """
    (B, N), device = tokens_BN.shape, tokens_BN.device
    scattered = torch.rand(B, N, device=device) < torch.rand(B, 1, device=device) * max_noise
    prefixed = (torch.rand(B, device=device) < wrong_prefix) & captioned
    before = torch.arange(N, device=device) < torch.rand(B, 1, device=device) * N
    one = torch.randint(1, max(B, 2), (B, 1), device=device).expand(B, N)
    several = torch.randint(1, max(B, 2), (B, N), device=device)
    in_prefix = prefixed[:, None] & before
    donors = (torch.arange(B, device=device)[:, None] + torch.where(in_prefix, one, several)) % B
    return torch.where(scattered | in_prefix, tokens_BN.gather(0, donors), tokens_BN)


def train_generator(
    config: GeneratorConfig,
    data: CaptionedImages,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/transformer`.

    Images that are larger than the model's grid are downscaled to it.

    Args:
        tokenizer_folder: a saved `VQModel`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.

    Returns:
        `validation_loss` in nats per token, and `wrong_caption_loss`, the same under the captions of other images: as long as
            the two are close, the model ignores captions.
    """
    trainer = GeneratorTrainer(config, data, tokenizer_folder, text_encoder_folder, folder, device)
    fit(trainer)
    return export(trainer.run, trainer.model, "transformer", trainer.evaluate())


class GeneratorTrainer(Trainer):
    """Trains a next-token model."""

    def __init__(
        self,
        config: GeneratorConfig,
        data: CaptionedImages,
        tokenizer_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
    ):
        torch.manual_seed(config.seed)
        model = LlamaGenTransformer(**{"condition": "text", **config.model})
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        if model.config.vocab_size != vqvae.config.codebook_size:
            raise ValueError(
                f"vocab_size must be the tokenizer's {vqvae.config.codebook_size} codes, got {model.config.vocab_size}"
            )
        super().__init__(config, model, folder, device, "generator", tokenizer=hash_tokens(vqvae))
        self.data, self.tokens = data, load_or_encode(folder, data.images, vqvae, model.config.grid_size)
        self.bank = CaptionBank(text_encoder_folder, min(config.max_caption_tokens, model.config.cls_token_num), device)
        self.training = data.indices("train")
        self.validation = take_evenly(data.indices("validation").tolist(), _EVALUATED)
        matrices = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2]
        others = [p for name, p in model.named_parameters() if not (name.startswith("layers.") and p.dim() == 2)]
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.adamw_learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
        ]

    def step(self, step: int) -> dict[str, Tensor]:
        """Run one training step; returns the loss in nats per token."""
        config = self.config
        rng, words = np.random.default_rng((config.seed, step)), random.Random(config.seed * 1_000_003 + step)
        torch.manual_seed(config.seed * 1_000_003 + step)  # noise is a function of the step
        chosen = self.training[rng.integers(0, len(self.training), config.batch_size)]
        tokens = self._tokens(chosen)
        dropped = torch.from_numpy(rng.random(len(chosen)) < config.caption_dropout).to(self.device)
        condition = self._condition([self.data.sample_caption(int(i), words) for i in chosen])
        condition = self._drop_captions(condition, dropped)
        noisy = corrupt_tokens(tokens, config.token_noise, config.wrong_prefix_probability, ~dropped)
        loss = self._loss(noisy, tokens, condition)
        self.update(step, loss)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics on validation images; see `train_generator`."""
        self.model.eval()
        sums = {"validation_loss": 0.0, "wrong_caption_loss": 0.0}
        captions = [self.data.captions(i)[0] for i in self.validation]
        shifted = captions[1:] + captions[:1]
        for name, texts in zip(sums, (captions, shifted), strict=True):
            for start in range(0, len(texts), self.config.batch_size):
                part = slice(start, start + self.config.batch_size)
                tokens = self._tokens(np.array(self.validation[part]))
                sums[name] += float(self._loss(tokens, tokens, self._condition(texts[part]))) * len(tokens)
        return {name: value / len(captions) for name, value in sums.items()}

    def _tokens(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(self.tokens[indices].astype(np.int64)).to(self.device)

    def _condition(self, texts: list[str]) -> Condition:
        condition = self.bank(texts)
        assert condition.caption_embeds is not None and condition.caption_mask is not None
        embeds, valid = left_pad(condition.caption_embeds, condition.caption_mask)
        return Condition(caption_embeds=embeds, caption_mask=valid)

    def _drop_captions(self, condition: Condition, dropped: Tensor) -> Condition:
        """Replace captions by the null caption where `dropped [B]`, keeping the row's mask, as guidance does at inference."""
        null = self.model.null_condition(condition)
        assert null.caption_embeds is not None and condition.caption_embeds is not None
        embeds = torch.where(dropped[:, None, None], null.caption_embeds, condition.caption_embeds)
        return Condition(caption_embeds=embeds, caption_mask=condition.caption_mask)

    def _loss(self, inputs: Tensor, targets: Tensor, condition: Condition) -> Tensor:
        """Return the mean cross-entropy in nats per token, teacher-forced."""
        with self.amp():
            logits = self.model(inputs, condition).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
