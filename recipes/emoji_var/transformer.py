"""Train a `VARTransformer` on captioned images, or a small one that generates the late scales like a large one.

The large one learns by self-corrected teacher forcing (`SelfCorrection`), with loss weights proportional to the side of a
scale. Further images per step train only the first scales, which determine what is in an image and cost a quarter. The small
one (CoDe, Chen et al. 2024, arXiv:2411.17787) first imitates its teacher's probabilities at all scales, then only at the last
ones, given early scales that the teacher generated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.data import LatentBatch, LatentBatches, LatentStore, SelfCorrection
from recipes.emoji_var.generate import NextScaleEvaluation, sample_tokens, save_sample_sheet
from vargen.device import preferred_dtype
from vargen.models.component_files import validate_network_files
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.augment import SamplingWeights
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionBank
from vargen.training.next_token import validate_same_shape
from vargen.training.next_token_losses import chunked_cross_entropy
from vargen.training.optimizers import split_optimizers
from vargen.training.run import Trainer, export, fit
from vargen.weight_files import weights_digest

_TEACHER_GUIDANCE = 1.5  # of the early scales that a teacher generates


@dataclass(frozen=True)
class NextScaleConfig:
    """How to train a `VARTransformer` on captioned images. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    sampling_weights: SamplingWeights = field(default_factory=SamplingWeights)
    seed: int = 0
    batch_size: int = 64
    early_batch_size: int = 0  # further images per step that train only the first scales, at a quarter of the cost each
    early_scales: int = 4
    caption_dropout: float = 0.1
    max_caption_tokens: int = 16  # longer captions are truncated: one shape for all batches
    code_noise: float = 0.3  # maximum fraction of a scale's codes that are wrong; later scales learn to correct them
    shift_pixels: int = 8  # augmentation: each image is encoded at several offsets up to this
    shift_variants: int = 7
    flip_probability: float = 0.0  # probability of mirroring images without text or a named side
    recolor_probability: float = 0.15  # probability of recoloring an image with a dominant color, and its caption
    adamw_learning_rate: float = 4e-3
    adamw_beta2: float = 0.996
    weight_decay: float = 0.2
    all_scales_fraction: float = 0.4  # with a teacher: first part of training, on all scales
    late_scales: int = 2  # with a teacher: number of last scales in the rest, half of it on early scales from the teacher
    cross_entropy: float = 0.3  # weight of the images' own codes relative to the teacher's probabilities in that part
    compile: bool = False
    evaluate_every: int = 500
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "early_scales", "max_caption_tokens", "late_scales")
        at_least(self, 1, "evaluate_every", "checkpoint_every")
        at_least(self, 0, "early_batch_size", "shift_pixels", "shift_variants", "weight_decay", "cross_entropy")
        validate_fractions(
            self, "caption_dropout", "code_noise", "flip_probability", "recolor_probability", "all_scales_fraction"
        )


def hash_tokenizer(vq: MultiScaleVQModel) -> str:
    """Return a digest of everything that determines the tokens: encoder, codes, convolutions and gains, but not the decoder."""
    gains = torch.nn.Module()
    gains.register_buffer("gains", torch.tensor([float(vq.quantize.gain(k)) for k in range(len(vq.scales))]))
    return weights_digest(vq.encoder, vq.quant_conv, vq.quantize.embedding, vq.quantize.quant_resi, gains)


def validate_var_fit(model: VARTransformer, vq: MultiScaleVQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square images of `side` pixels match the model's scales and vocabulary."""
    if side != vq.image_size:
        raise ValueError(f"images must have the tokenizer's {vq.image_size} pixels, got {side}")
    for name, value, expected in (
        ("scales", tuple(model.scales), tuple(vq.scales)),
        ("vocab_size", model.config.vocab_size, vq.config.codebook_size),
        ("code_dim", model.config.code_dim, vq.config.codebook_embed_dim),
    ):
        if value != expected:
            raise ValueError(f"{name} must be the tokenizer's, {expected}, got {value}")


def distillation_loss(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over rows of KL(teacher || student), from logits `[B, T, V]` and weights `[T]`."""
    expected = teacher.log_softmax(-1)
    divergences = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
    return (divergences * weights).sum()


def scale_weights(scales: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the weight of each token `[T]`: 1/side, so that a scale counts in proportion to its side, not its area."""
    return torch.cat([torch.full((side * side,), 1 / side, device=device) for side in scales])


class NextScaleLoss:
    """The loss of a step, of images alone or with a teacher."""

    def __init__(self, model: VARTransformer, vq: MultiScaleVQModel, config: NextScaleConfig, teacher: VARTransformer | None):
        self.model, self.vq, self.config, self.teacher = model, vq, config, teacher
        self.correct = SelfCorrection(vq, config.code_noise)
        self.dtype = preferred_dtype(model.device)
        self.weights = scale_weights(model.scales, model.device)
        if config.compile:
            for block in model.blocks:
                block.compile(dynamic=False)  # same shapes and code: compiled once, for all scales and for the early ones

    def __call__(self, step: int, batches: LatentBatches) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and values to log, as a function of (seed, step)."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        full = batches(step, config.batch_size)
        if self.teacher is None:
            early = batches(step, config.early_batch_size, 1) if config.early_batch_size else None
            return self.image_loss(full, early, generator)
        late = step >= config.all_scales_fraction * config.schedule.steps
        return self.late_scale_loss(full, generator) if late else self.all_scale_loss(full, generator)

    def image_loss(
        self, full: LatentBatch, early: LatentBatch | None, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted mean cross-entropy over all scales of `full` and the first scales of `early`."""
        ends, count = self.model.ends, min(self.config.early_scales, len(self.model.scales))
        total, losses = self._cross_entropy(full, generator, len(self.model.scales))
        weight = self.weights.sum() * len(full.texts)
        if early is not None:
            more, _ = self._cross_entropy(early, generator, count)
            total = total + more
            weight = weight + self.weights[: ends[count - 1]].sum() * len(early.texts)
        means = losses.mean(0)
        early_end = ends[count - 1]
        return total / weight, {"tokens": means.mean(), "early": means[:early_end].mean(), "first": means[: ends[0]].mean()}

    def _cross_entropy(self, batch: LatentBatch, generator: torch.Generator, scales: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.correct(batch.latents, generator, scales)
        with self._amp():
            features = self.model.forward_features(inputs, batch.condition)
        head, weights = self.model.head, self.weights[: targets.shape[1]]
        return chunked_cross_entropy(head.weight, head.bias, features.float(), targets, weights, self.dtype)

    def all_scale_loss(self, batch: LatentBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the divergence from the teacher at all scales."""
        inputs, _ = self.correct(batch.latents, generator)
        logits, teacher = self._both(inputs, batch, None)
        loss = distillation_loss(logits, teacher, self.weights) / (self.weights.sum() * len(batch.texts))
        divergence = distillation_loss(logits.detach(), teacher, torch.ones_like(self.weights)) / logits[..., 0].numel()
        return loss, {"divergence": divergence}

    def late_scale_loss(self, batch: LatentBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the divergence from the teacher at the last scales, plus cross-entropy.

        Half of the batch has early scales that the teacher generated, the other half those of real images, self-corrected.
        """
        assert self.teacher is not None
        scales = min(self.config.late_scales, len(self.model.scales) - 1)
        half, early = len(batch.texts) // 2, len(self.model.scales) - 1
        inputs, targets = self.correct(batch.latents, generator)
        if half:
            condition = batch.condition.select_rows(slice(0, half))
            generated = sample_tokens(self.teacher, self.vq, condition, generator, _TEACHER_GUIDANCE, scales=early)
            f_hat, rows = self.vq.zero_latent(half), []
            for k, tokens in enumerate(generated):
                f_hat, following = self.vq.next_input(f_hat, tokens, k)
                rows.append(following)
            inputs = torch.cat([torch.cat(rows, 1).to(inputs), inputs[half:]])  # type: ignore[arg-type]
        logits, teacher = self._both(inputs, batch, scales)
        weights = self.weights[-logits.shape[1] :]
        loss = distillation_loss(logits, teacher, weights) / (weights.sum() * len(batch.texts))
        right = targets[half:, -logits.shape[1] :]
        nats = F.cross_entropy(logits[half:].flatten(0, 1), right.flatten(), reduction="none").view(right.shape)
        cross_entropy = (nats * weights).sum() / (weights.sum() * len(right))
        divergence = distillation_loss(logits.detach(), teacher, torch.ones_like(weights)) / logits[..., 0].numel()
        metrics = {"late_divergence": divergence, "late": nats.detach().mean()}
        return loss + self.config.cross_entropy * cross_entropy, metrics

    def _both(self, inputs: Tensor, batch: LatentBatch, scales: int | None) -> tuple[Tensor, Tensor]:
        """Return the logits of model and teacher at the last `scales`."""
        assert self.teacher is not None
        with self._amp():
            logits = self.model(inputs, batch.condition, logits_of=scales).logits
            with torch.no_grad():
                teacher = self.teacher(inputs, batch.condition, logits_of=scales).logits
        return logits, teacher

    def _amp(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def _initial_model(config: NextScaleConfig, init_folder: Path | None) -> tuple[VARTransformer, str | None]:
    """Return the model to train, and the digest of the weights that it starts from.

    Raises:
        ValueError: if the weights are damaged or differ in shape from the config.
    """
    options = {"condition": "text", **config.model}
    model = VARTransformer(**options)
    if init_folder is None:
        return model, None
    validate_network_files(init_folder, VARTransformer)
    start = VARTransformer.from_pretrained(init_folder)
    validate_same_shape(init_folder, start, model, list(options))
    model.load_state_dict(start.state_dict())
    return model, weights_digest(start)


class NextScaleTrainer(Trainer):
    """Trains a next-scale model."""

    def __init__(
        self,
        config: NextScaleConfig,
        data: EmojiDataset,
        tokenizer_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
        teacher_folder: Path | None,
        init_folder: Path | None,
    ):
        validate_network_files(tokenizer_folder, MultiScaleVQModel)
        if teacher_folder is not None:
            validate_network_files(teacher_folder, VARTransformer)
        torch.manual_seed(config.seed)
        model, init = _initial_model(config, init_folder)
        self.vq = vq = MultiScaleVQModel.from_pretrained(tokenizer_folder).to(device).eval().requires_grad_(False)
        validate_var_fit(model, vq, data.images.shape[1])
        identity = {"tokenizer": hash_tokenizer(vq)} | ({} if init is None else {"init": init})
        teacher = None
        if teacher_folder is not None:
            teacher = VARTransformer.from_pretrained(teacher_folder).to(device).eval().requires_grad_(False)
            validate_var_fit(teacher, vq, data.images.shape[1])
            identity["teacher"] = weights_digest(teacher)
        super().__init__(config, model, folder, device, "var", **identity)
        store = LatentStore(folder, data.images, vq, config, device)
        self.bank = CaptionBank(text_encoder_folder, config.max_caption_tokens, device)
        early = min(config.early_scales, len(vq.scales))
        self.evaluation = NextScaleEvaluation(data, config.sampling_weights, store, self.bank, early)
        self.batches, self.loss = LatentBatches(data, store, self.bank, config), NextScaleLoss(model, vq, config, teacher)
        self.optimizers = split_optimizers(
            dict(model.named_parameters()),
            lambda name: name.startswith(("blocks.", "caption_")) and ".ada_lin." not in name,
            config,
        )

    def step(self, step: int) -> dict[str, Tensor]:
        loss, metrics = self.loss(step, self.batches)
        self.update(step, loss)
        return {"loss": loss.detach(), **metrics}

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of `NextScaleEvaluation`, and save images to `samples.png`."""
        with torch.compiler.set_stance("force_eager"):  # rare, with shapes of its own: not worth compiling
            metrics = self.evaluation(self.model.eval())
            save_sample_sheet(self.model, self.vq, self.bank, self.folder / "samples.png")
        return metrics


def train_next_scale(
    config: NextScaleConfig,
    data: EmojiDataset,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    teacher_folder: Path | None = None,
    init_folder: Path | None = None,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/transformer`.

    Each evaluation saves generated images to `folder/samples.png`.

    Args:
        tokenizer_folder: a saved `MultiScaleVQModel`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        teacher_folder: a saved `VARTransformer` to imitate. init_folder: a saved one with the config's shape to start from.

    Returns:
        The metrics of `NextScaleEvaluation`.

    Raises:
        ValueError: if a saved network is damaged; if data set, tokenizer, model and teacher are not compatible; if a run to
            resume has another tokenizer or teacher; or if the run diverged.
    """
    folders = tokenizer_folder, text_encoder_folder, folder
    trainer = NextScaleTrainer(config, data, *folders, device, teacher_folder, init_folder)
    fit(trainer)
    groups = ("seen", "styles", "concepts")
    panels = (tuple(f"{metric}_{group}" for group in groups) for metric in ("loss", "rank", "gap"))
    return export(trainer.run, trainer.model, "transformer", trainer.evaluate(), ("loss", "tokens", "early"), *panels)
