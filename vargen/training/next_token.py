"""Train a `LlamaGenTransformer` on the tokens of captioned images.

When to stop is decided by how well generated images match their prompts. Validation loss and entropy are reported as well,
because peaked probabilities would flatter speculative methods that are measured on images of the training set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vargen.models.component_files import validate_network_files
from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.training.augment import SamplingWeights
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionBank, CaptionedImages, take_evenly
from vargen.training.next_token_evaluation import NextTokenEvaluation
from vargen.training.next_token_losses import (
    CodebookPrior,
    NeighborNoise,
    chunked_cross_entropy,
    corrupt_tokens,
    drop_captions,
    first_token_weights,
)
from vargen.training.optimizers import split_optimizers
from vargen.training.run import Trainer, export, fit
from vargen.training.token_cache import CaptionBatches, TokenStore, hash_tokens, validate_fit
from vargen.weight_files import weights_digest

_AVERAGE_EVERY = 5  # steps
_SAMPLE = 96  # validation images of an evaluation between steps

# Maps a tokenizer, a model and caption features to a function from a number of images (None: all) to their metrics.
ImageMetrics = Callable[[VQModel, LlamaGenTransformer, CaptionBank], Callable[[int | None], dict[str, float]]]


@dataclass(frozen=True)
class NextTokenConfig:
    """How to train a `LlamaGenTransformer` on tokens. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    sampling_weights: SamplingWeights = field(default_factory=SamplingWeights)
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.1
    max_caption_tokens: int = 16  # longer captions are truncated: one shape for all batches
    shift_pixels: int = 8  # augmentation: each image is tokenized at several offsets up to this
    shift_variants: int = 0
    flip_probability: float = 0.0  # probability of mirroring images without text or a named side
    recolor_probability: float = 0.15  # probability of recoloring an image with a dominant color, and its caption
    dropout: float = 0.0
    token_noise: float = 0.1  # fraction of input tokens from other images, per image uniform from 0 to this
    wrong_prefix_probability: float = 0.0  # probability that an input starts with another image's tokens
    neighbor_noise: float = 0.0  # fraction of input tokens replaced by near codes, per image uniform from 0 to this
    first_token_weight: float = 1.0  # loss weight of the first tokens of an image's content; later tokens have weight 1
    optimizer: str = "muon"  # Muon for the matrices, AdamW for the rest; or "adamw" for all
    adamw_learning_rate: float = 3e-3
    adamw_beta2: float = 0.996
    weight_decay: float = 0.05
    average_last_fraction: float = 0.05  # final share of training over which weights are averaged
    recall_images: int = 64  # images generated and scored at each evaluation; 0 for none
    compile: bool = False
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_caption_tokens", "evaluate_every", "checkpoint_every")
        at_least(self, 1, "first_token_weight")
        at_least(self, 0, "shift_pixels", "shift_variants", "dropout", "weight_decay", "recall_images")
        validate_fractions(self, "caption_dropout", "flip_probability", "recolor_probability", "token_noise", "neighbor_noise")
        validate_fractions(self, "wrong_prefix_probability", "average_last_fraction", "adamw_beta2")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")


def train_next_token(
    config: NextTokenConfig,
    data: CaptionedImages,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    init_folder: Path | None = None,
    image_metrics: ImageMetrics | None = None,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the averaged weights to `folder/transformer`.

    Args:
        tokenizer_folder: a saved `VQModel`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        init_folder: a saved `LlamaGenTransformer` with the config's shape, except for the grid, to start from.
        image_metrics: scores `config.recall_images` generated images at each evaluation, and all of them at the end.

    Returns:
        The metrics of these weights: those of `NextTokenEvaluation` and `image_metrics`, and `held_out_loss` and `entropy` in
            nats per token.

    Raises:
        ValueError: for a damaged network file; images, tokenizer and model that are not compatible; a run in `folder` that is
            damaged or has another config; or a run that diverged.
    """
    trainer = NextTokenTrainer(config, data, tokenizer_folder, text_encoder_folder, folder, device, init_folder, image_metrics)
    fit(trainer)
    weights = trainer.average or trainer.prior.merge_into(trainer.model)
    metrics = trainer.compute_metrics(weights, None, trainer.validation)
    network = LlamaGenTransformer.from_config(trainer.model.config)  # generating changed the layout of `trainer.evaluated`
    network.load_state_dict(weights)
    groups = tuple(trainer.evaluation.groups)
    panels = ("loss", "gap", *(("top5",) if trainer.image_metrics else ()))
    per_group = (tuple(f"{name}_{group}" for group in groups) for name in panels)
    return export(trainer.run, network, "transformer", metrics, ("loss", "held_out_loss"), ("entropy",), *per_group)


def load_or_init(config: NextTokenConfig, init_folder: Path | None) -> tuple[LlamaGenTransformer, str | None]:
    """Return the model to train, and an identifier of the weights that it starts from.

    Raises:
        ValueError: if the weights are damaged or differ in shape from the config.
    """
    options: dict[str, Any] = {"condition": "text", **config.model}
    model = LlamaGenTransformer(**{"dropout": config.dropout, **options})
    if init_folder is None:
        return model, None
    validate_network_files(init_folder, LlamaGenTransformer)
    start = LlamaGenTransformer.from_pretrained(init_folder)
    validate_same_shape(init_folder, start, model, [name for name in options if name != "grid_size"])  # no weight depends on it
    model.load_state_dict(start.state_dict())
    return model, weights_digest(start)


def validate_same_shape(folder: Path, start: Any, model: Any, names: list[str]) -> None:
    """Raise ValueError if the weights of `start` differ from `model` in one of these settings."""
    other = {name: start.config[name] for name in names if start.config[name] != model.config[name]}
    if other:
        expected = {name: model.config[name] for name in other}
        raise ValueError(f"init {str(folder)!r} must have the config's {expected}, got {other}")


class _Features(nn.Module):
    """The features before the head, as a module whose weights can be replaced for one call."""

    def __init__(self, model: LlamaGenTransformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, condition: Condition) -> Tensor:
        return self.model.forward_features(tokens, condition)


class NextTokenTrainer(Trainer):
    """Trains a next-token model.

    Attributes:
        average, average_count: the mean of the last weights, and the number of weights in it.
    """

    def __init__(
        self,
        config: NextTokenConfig,
        data: CaptionedImages,
        tokenizer_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
        init_folder: Path | None,
        image_metrics: ImageMetrics | None,
    ):
        torch.manual_seed(config.seed)
        model, start = load_or_init(config, init_folder)
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        validate_fit(model, vqvae, data.images.shape[1])
        identity = {"tokenizer": hash_tokens(vqvae)} | ({"init": start} if start else {})
        super().__init__(config, model, folder, device, "generator", **identity)
        self.store = TokenStore(folder, data.images, vqvae, config, device)
        self.bank = CaptionBank(text_encoder_folder, min(config.max_caption_tokens, model.config.cls_token_num), device)
        self.batches = CaptionBatches(data, self.store, self.bank, config)
        codes = vqvae.quantize.codebook().detach().float()
        self.prior = CodebookPrior(codes, model.config.dim, pretrained=init_folder is not None).to(device)
        self.neighbor_noise = NeighborNoise(codes, config.neighbor_noise)
        self.evaluated = LlamaGenTransformer.from_config(model.config).to(device).eval()  # the plain model that would be saved
        self.evaluation = NextTokenEvaluation(data, config.sampling_weights, self.store, self.bank)
        self.validation = data.indices("validation")
        self.optimizers = split_optimizers(
            {**dict(model.named_parameters()), **{f"prior.{name}": p for name, p in self.prior.named_parameters()}},
            lambda name: name.startswith(("layers.", "cls_embedding.cap_proj.")),
            config,
        )
        self.features = _Features(model)
        if config.compile:
            for layer in model.layers:
                layer.compile(dynamic=False)  # same shapes and code: compiled only once
        self.average, self.average_count = dict[str, Tensor](), 0
        self.image_metrics: Callable[[int | None], dict[str, float]] | None = None
        if config.recall_images and image_metrics is not None:
            self.image_metrics = image_metrics(vqvae, self.evaluated, self.bank)

    @property
    def _average_from(self) -> int:
        """The first step whose weights are included in the average."""
        steps = self.config.schedule.steps
        return steps - max(1, round(self.config.average_last_fraction * steps))

    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *self.prior.parameters()]

    def state_dict(self) -> dict[str, Any]:
        average = {"average": self.average, "averaged": self.average_count, "average_from": self._average_from}
        return {**super().state_dict(), "prior": self.prior.state_dict(), **average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.prior.load_state_dict(state["prior"])
        if state["average_from"] == self._average_from:  # otherwise the number of steps has changed
            self.average, self.average_count = state["average"], state["averaged"]

    def step(self, step: int) -> Mapping[str, Tensor]:
        """Run one training step; returns the unweighted loss in nats per token."""
        config, model = self.config, self.model
        torch.manual_seed(config.seed * 1_000_003 + step)  # makes dropout and noise functions of the step
        tokens, condition, dropped = self.batches(step)
        condition = drop_captions(condition, model, dropped)
        noisy = corrupt_tokens(tokens, config.token_noise, config.wrong_prefix_probability, ~dropped)
        weights = self.prior.weights(model)
        head = weights.pop("output.weight")
        summed = {f"model.{name}": weight for name, weight in weights.items()}
        with self.amp():
            features = torch.func.functional_call(self.features, summed, (self.neighbor_noise(noisy), condition))
        loss_weights = first_token_weights(tokens, self.store.tokenize.code, config.first_token_weight)
        total, losses = chunked_cross_entropy(head, None, features.float(), tokens, loss_weights, self.dtype)
        self.update(step, total / loss_weights.sum())
        done = step + 1
        if done > self._average_from and (done % _AVERAGE_EVERY == 0 or done == config.schedule.steps):
            self._update_average()
        return {"loss": losses.mean()}

    def _update_average(self) -> None:
        """Add the current weights to the average; weights of one run average well (Izmailov et al. 2018, arXiv:1803.05407)."""
        weights = self.prior.merge_into(self.model)
        self.average_count += 1
        if self.average_count == 1:
            self.average = weights
        for name, value in self.average.items():
            value.lerp_(weights[name], 1 / self.average_count)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the current weights on a sample of the validation images."""
        sample = self.validation[take_evenly(range(len(self.validation)), _SAMPLE)]
        return self.compute_metrics(self.prior.merge_into(self.model), self.config.recall_images, sample)

    def compute_metrics(self, weights: dict[str, Tensor], num_images: int | None, validation: Any) -> dict[str, float]:
        """Return the metrics of `weights`.

        Args:
            num_images: approximate number of generated images; None for all. validation: indices of validation images.
        """
        self.evaluated.load_state_dict(weights)
        metrics = {**self.evaluation.validation_loss(self.evaluated, validation), **self.evaluation(self.evaluated)}
        return metrics if self.image_metrics is None else metrics | self.image_metrics(num_images)
