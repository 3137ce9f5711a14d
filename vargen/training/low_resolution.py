"""Train what `mulo` needs: a small `LlamaGenTransformer` of a low resolution, and a `TokenUpsampler` from it to the full one.

`vargen train drafter low-res` and `upsampler` do so; `recipes/train_llamagen.py` trains a model of one's own with the same
trainer, on the tokens of captioned images at the resolution of its grid.

Shape suffixes: B images, N tokens in raster order (of the high resolution), C channels, Y/X pixels, V vocabulary.
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
from tqdm.auto import tqdm

from vargen.files import atomic_file
from vargen.models.guidance import Condition
from vargen.models.heads.network import TokenUpsampler
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.prompts import left_pad
from vargen.training.dataset import CaptionBank, CaptionedImages, take_evenly, to_pixels
from vargen.training.loop import Schedule, Trainer, at_least, export, fit, validate_fractions
from vargen.weight_files import weights_digest

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


# -- tokens of training images, stored in the folder of the run ------------------------------------------------------------


_AT_ONCE = 16  # images
_WHITE = 0.98  # in [-1, 1]; a patch is blank if none of its values is lower


def hash_tokens(vqvae: VQModel) -> str:
    """Return an identifier of the tokens of a tokenizer: of its encoder, codebook and code of blank patches."""
    code = vqvae.config.blank_code
    digest = weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)
    return f"{digest}-blank{'' if code is None else code}"


@torch.no_grad()
def encode_images(vqvae: VQModel, pixels_BCYX: Tensor) -> Tensor:
    """Encode images in [-1, 1] as int64 `[B, N]`; if the tokenizer has a `blank_code`, all blank patches get it.

    An encoder with a global receptive field gives each white patch a code that depends on the rest of the image. The first
    tokens then identify the image, and a model memorizes images by them instead of reading the caption.
    """
    tokens = vqvae.encode(pixels_BCYX).flatten(1)
    if vqvae.config.blank_code is None:
        return tokens
    lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), vqvae.downsampling)
    return tokens.masked_fill(lowest.flatten(1) >= _WHITE, vqvae.config.blank_code)


def downscale(pixels_BCYX: Tensor, side: int) -> Tensor:
    """Average blocks of pixels of images in [-1, 1] to `side` pixels, rounded to the 256 values of stored images."""
    factor = pixels_BCYX.shape[-1] // side
    if factor == 1:
        return pixels_BCYX
    return ((F.avg_pool2d(pixels_BCYX, factor) + 1) * 127.5).round() / 127.5 - 1


def load_or_encode(folder: Path, images: np.ndarray, vqvae: VQModel, grid: int) -> np.ndarray:
    """Return the tokens of images at the resolution of a grid, int32 `[images, grid * grid]`.

    They are stored in `folder`, so that a resumed run reads them.

    Args:
        images: uint8 `[N, Y, X, 3]`. vqvae: the tokenizer, on the device that encodes. grid: tokens per side.
    """
    side, full = grid * vqvae.downsampling, images.shape[1]
    if side > full or full % side:
        raise ValueError(f"a grid of {grid} tokens has {side} pixels, which must divide the {full} pixels of the images")
    path = folder / f"tokens-{grid}-{hash_tokens(vqvae)}.npy"
    if path.is_file():
        stored = np.load(path, allow_pickle=False)
        if stored.shape == (len(images), grid * grid):
            return stored
    parts = []
    for start in tqdm(range(0, len(images), _AT_ONCE), desc="tokens", disable=None, mininterval=5):
        pixels = to_pixels(images[start : start + _AT_ONCE], vqvae.device)
        parts.append(encode_images(vqvae, downscale(pixels, side)).to(torch.int32).cpu().numpy())
    tokens = np.concatenate(parts)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, tokens)
    return tokens


# -- from the tokens of a low resolution to those of a high one ------------------------------------------------------------


@dataclass(frozen=True)
class UpsamplerConfig:
    """How to train a `TokenUpsampler`. `model`: constructor arguments other than vocabulary and grids."""

    model: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    low_grid: int = 8
    seed: int = 0
    batch_size: int = 32
    token_noise: float = 0.1  # share of known tokens that are wrong, per image uniform from 0 to this: drafts contain errors
    ahead_weight: float = 0.25  # loss weight of tokens whose row above is unknown
    weight_decay: float = 0.01
    evaluate_every: int = 200
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "low_grid", "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "weight_decay", "ahead_weight")
        validate_fractions(self, "token_noise")


def train_upsampler(
    config: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/upsampler`.

    Args:
        tokenizer_folder: a saved `VQModel`.

    Returns:
        Nats per token and top-1 accuracy on validation images, with all rows above known (`row_loss`, `row_accuracy`) and with
            none known (`image_loss`, `image_accuracy`).
    """
    trainer = UpsamplerTrainer(config, data, tokenizer_folder, folder, device)
    fit(trainer)
    return export(trainer.run, trainer.model, "upsampler", trainer.evaluate())


class UpsamplerTrainer(Trainer):
    """Trains an upsampler to predict the tokens of a row from the low resolution and the rows above.

    Where the rows above are not generated yet, it predicts from the low resolution alone.
    """

    def __init__(
        self, config: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
    ):
        torch.manual_seed(config.seed)
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        grid, vocab = data.images.shape[1] // vqvae.downsampling, vqvae.config.codebook_size
        model = TokenUpsampler(vocab, config.low_grid, grid, **config.model, codes=vqvae.quantize.digest())
        identity = {"low_grid": config.low_grid, "tokenizer": hash_tokens(vqvae)}
        super().__init__(config, model, folder, device, "upsampler", **identity)
        self.low, self.high = (load_or_encode(folder, data.images, vqvae, each) for each in (config.low_grid, grid))
        self.training, validation = data.indices("train"), data.indices("validation")
        self.validation = np.array(take_evenly(validation.tolist(), _EVALUATED))
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)]

    def tokens(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the tokens of images at both resolutions, int64 `[B, r, c]` and `[B, N]`."""
        low, high = (torch.from_numpy(part[indices].astype(np.int64)).to(self.device) for part in (self.low, self.high))
        side = self.config.low_grid
        return low.unflatten(1, (side, side)), high

    def logits(self, low: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Return float32 logits `[B, N, V]`; only the `known` tokens are seen."""
        with self.amp():
            return self.model(self.model.features(low), tokens, known).float()

    def step(self, step: int) -> dict[str, Tensor]:
        """Run one training step; returns the loss in nats per token."""
        config = self.config
        rng = np.random.default_rng((config.seed, step))
        low, high = self.tokens(self.training[rng.integers(0, len(self.training), config.batch_size)])
        (B, N), columns = high.shape, self.model.config.grid_size
        length = torch.from_numpy(rng.integers(1, N + 1, B)).to(self.device)
        place = torch.arange(N, device=self.device)
        known = place < length[:, None]
        noise = torch.from_numpy(rng.random((B, N)) < config.token_noise * rng.random((B, 1))).to(self.device)
        seen = torch.where(noise, high.roll(1, dims=0), high)
        weight = torch.where(place < length[:, None] + columns, 1.0, config.ahead_weight)
        losses = F.cross_entropy(self.logits(low, seen, known).movedim(-1, 1), high, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        self.update(step, loss)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics on validation images; see `train_upsampler`."""
        self.model.eval()
        values: dict[str, list[Tensor]] = {}
        for start in range(0, len(self.validation), self.config.batch_size):
            low, high = self.tokens(self.validation[start : start + self.config.batch_size])
            for name, known in (("row", torch.ones_like(high).bool()), ("image", torch.zeros_like(high).bool())):
                logits = self.logits(low, high, known)
                values.setdefault(f"{name}_loss", []).append(F.cross_entropy(logits.flatten(0, 1), high.flatten()))
                values.setdefault(f"{name}_accuracy", []).append((logits.argmax(-1) == high).float().mean())
        return {name: float(torch.stack(parts).mean()) for name, parts in values.items()}
