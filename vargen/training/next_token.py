"""Train a `LlamaGenTransformer` on the tokens of captioned images.

When to stop is decided by how well generated images match their prompts. Held-out loss and entropy are reported as well,
because peaked probabilities would flatter speculative methods that are measured on images of the training set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.component_files import check_network_files
from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.training.blanks import tokens_digest
from vargen.training.caption_bank import CaptionBank
from vargen.training.config import NextTokenConfig
from vargen.training.dataset import CaptionedImages, spread
from vargen.training.head_loss import head_loss
from vargen.training.next_token_evaluation import Evaluation
from vargen.training.next_token_losses import CodePrior, NearNoise, drop_captions, noisy, start_weights
from vargen.training.optimizers import Muon
from vargen.training.run import TrainingRun
from vargen.training.token_cache import Batches, TokenStore, check_fit
from vargen.weight_files import weights_digest

logger = logging.getLogger("vargen")

_AVERAGE_EVERY = 5  # steps

# Maps a tokenizer, a model and caption features to a function from a number of images (None: all) to their metrics.
ImageMetrics = Callable[[VQModel, LlamaGenTransformer, CaptionBank], Callable[[int | None], dict[str, float]]]


def optimizers(model: LlamaGenTransformer, prior: CodePrior, recipe: NextTokenConfig) -> list[torch.optim.Optimizer]:
    """Create the optimizers: Muon for the matrices of the blocks and the caption projection, AdamW for the rest; or AdamW for
    all.

    The rest are embeddings, head and norms.
    """
    inside = ("layers.", "cls_embedding.cap_proj.")
    blocks = [p for name, p in model.named_parameters() if name.startswith(inside) and p.dim() == 2]
    taken = {id(p) for p in blocks} if recipe.optimizer == "muon" else set()
    rest = [p for p in [*model.parameters(), *prior.parameters()] if id(p) not in taken]
    betas = (0.9, recipe.adamw_beta2)
    adamw = torch.optim.AdamW(rest, lr=recipe.adamw_learning_rate, betas=betas, weight_decay=0.0, fused=True)
    if recipe.optimizer == "adamw":
        return [adamw]
    return [Muon(blocks, lr=recipe.schedule.learning_rate, weight_decay=recipe.weight_decay), adamw]


def train_next_token(
    recipe: NextTokenConfig,
    data: CaptionedImages,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    init_folder: Path | None = None,
    image_metrics: ImageMetrics | None = None,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming the run in `folder`; saves the averaged weights to `folder/transformer`.

    Args:
        tokenizer_folder: a saved `VQModel`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        init_folder: a saved `LlamaGenTransformer` with the config's shape, except for the grid, to start from.
        image_metrics: scores `recipe.drawn` generated images at each evaluation, and all of them at the end.

    Returns:
        The metrics of these weights: those of `Evaluation` and `image_metrics`, and `held_out_loss` and `entropy` in nats per
            token.

    Raises:
        ValueError: for a damaged network file; images, tokenizer and model that are not compatible; a run in `folder` that is
            damaged or has another config; or a run that diverged.
    """
    trainer = _Trainer(recipe, data, tokenizer_folder, text_encoder_folder, folder, device, init_folder, image_metrics)
    run, steps = trainer.run, recipe.schedule.steps
    for step in run.progress(trainer.resumed()):
        loss = trainer.step(step)
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss)
        if done % recipe.evaluate_every == 0 and done != steps:
            run.log(done, **trainer.figures(trainer.prior.folded(trainer.model), recipe.drawn, sample=True))
        if done % recipe.checkpoint_every == 0 or done == steps:
            trainer.save(done)
    figures = trainer.finish()
    logger.info("generator %s: %s", folder, figures)
    return figures


def opened(recipe: NextTokenConfig, init_folder: Path | None) -> tuple[LlamaGenTransformer, str | None]:
    """Return the model to train, and an identifier of the weights that it starts from.

    Raises:
        ValueError: if the weights are damaged or differ in shape from the config.
    """
    options: dict[str, Any] = {"condition": "text", **recipe.model}
    model = LlamaGenTransformer(**{"dropout": recipe.dropout, **options})
    if init_folder is None:
        return model, None
    check_network_files(init_folder, LlamaGenTransformer)
    given = LlamaGenTransformer.from_pretrained(init_folder)
    same = [name for name in options if name != "grid_size"]  # no weight depends on the grid
    other = {name: given.config[name] for name in same if given.config[name] != model.config[name]}
    if other:
        asked = {name: model.config[name] for name in other}
        raise ValueError(f"init {str(init_folder)!r} holds a model of {other}, and the recipe asks for {asked}")
    model.load_state_dict(given.state_dict())
    return model, weights_digest(given)


class _Features(nn.Module):
    """The features before the head, as a module whose weights can be replaced for one call."""

    def __init__(self, model: LlamaGenTransformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, condition: Condition) -> Tensor:
        return self.model.hidden(tokens, condition)


class _Trainer:
    """A generator and the state that its training changes.

    Attributes:
        average, averaged: the mean of the last weights, and the number of weights in it.
    """

    def __init__(
        self,
        recipe: NextTokenConfig,
        data: CaptionedImages,
        tokenizer_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
        init_folder: Path | None,
        image_metrics: ImageMetrics | None,
    ):
        torch.manual_seed(recipe.seed)
        self.recipe, self.data, self.folder, self.device = recipe, data, folder, device
        self.model, start = opened(recipe, init_folder)
        self.model.to(device)
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        check_fit(self.model, vqvae, data.images.shape[1])
        config = self.model.config
        identity = {"kind": "generator", "model": dict(recipe.model), "seed": recipe.seed, "tokenizer": tokens_digest(vqvae)}
        self.run = TrainingRun(folder, identity | ({"init": start} if start else {}), recipe.schedule.steps)
        self.state = self.run.resume(device, ("model", "prior", "optimizers"))
        self.store = TokenStore(folder, data.images, vqvae, recipe, device)
        self.bank = CaptionBank(text_encoder_folder, min(recipe.caption_rows, config.cls_token_num), device)
        self.batches = Batches(data, self.store, self.bank, recipe)
        codes = vqvae.quantize.codebook().detach().float()
        self.prior = CodePrior(codes, config.dim, given=init_folder is not None).to(device)
        self.near = NearNoise(codes, recipe.near_noise)
        self.evaluated = LlamaGenTransformer.from_config(config).to(device).eval()  # the plain model that would be saved
        self.evaluate = Evaluation(data, recipe.focus, self.store, self.bank)
        self.held_out = data.indices("validation")
        self.steppers = optimizers(self.model, self.prior, recipe)
        self.dtype = preferred_dtype(device)
        self.features = _Features(self.model)
        if recipe.compile:
            for layer in self.model.layers:
                layer.compile(dynamic=False)  # same shapes and code: compiled only once
        self.average, self.averaged = dict[str, Tensor](), 0
        self.image_metrics: Callable[[int | None], dict[str, float]] | None = None
        if recipe.drawn and image_metrics is not None:
            self.image_metrics = image_metrics(vqvae, self.evaluated, self.bank)

    @property
    def _average_from(self) -> int:
        """The first step whose weights are included in the average."""
        steps = self.recipe.schedule.steps
        return steps - max(1, round(self.recipe.averaged * steps))

    def resumed(self) -> int:
        """Restore the checkpoint in the folder, if any; returns the next step."""
        start, state = 0, self.state
        if state:
            self.model.load_state_dict(state["model"])
            self.prior.load_state_dict(state["prior"])
            for stepper, saved in zip(self.steppers, state["optimizers"], strict=True):
                stepper.load_state_dict(saved)
            start = state["step"]
            if state["average_from"] == self._average_from:  # otherwise the number of steps has changed
                self.average, self.averaged = state["average"], state["averaged"]
        self.model.train()
        return start

    def save(self, step: int) -> None:
        self.run.checkpoint(
            step,
            model=self.model.state_dict(),
            prior=self.prior.state_dict(),
            optimizers=[stepper.state_dict() for stepper in self.steppers],
            average=self.average,
            averaged=self.averaged,
            average_from=self._average_from,
        )

    def step(self, step: int) -> Tensor:
        """Run one training step; returns the unweighted loss in nats per token."""
        recipe, model = self.recipe, self.model
        for stepper in self.steppers:
            for group in stepper.param_groups:
                group["lr"] = stepper.defaults["lr"] * recipe.schedule.factor(step)
            stepper.zero_grad(set_to_none=True)
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # makes dropout and noise functions of the step
        tokens, condition, dropped = self.batches(step)
        condition = drop_captions(condition, model, dropped)
        given = self.near(noisy(tokens, recipe.token_noise, recipe.wrong_starts, ~dropped))
        weights = self.prior.weights(model)
        head = weights.pop("output.weight")
        summed = {f"model.{name}": weight for name, weight in weights.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            features = torch.func.functional_call(self.features, summed, (given, condition))
        weighted = start_weights(tokens, self.store.tokens_of.code, recipe.start_weight)
        total, losses = head_loss(head, None, features.float(), tokens, weighted, self.dtype)
        (total / weighted.sum()).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *self.prior.parameters()], 1.0)
        for stepper in self.steppers:
            stepper.step()
        done = step + 1
        if done > self._average_from and (done % _AVERAGE_EVERY == 0 or done == recipe.schedule.steps):
            self._take_into_average()
        return losses.mean()

    def _take_into_average(self) -> None:
        """Add the current weights to the average; weights of one run average well (Izmailov et al. 2018, arXiv:1803.05407)."""
        weights = self.prior.folded(self.model)
        self.averaged += 1
        if self.averaged == 1:
            self.average = weights
        for name, value in self.average.items():
            value.lerp_(weights[name], 1 / self.averaged)

    def figures(self, weights: dict[str, Tensor], drawn: int | None, sample: bool) -> dict[str, float]:
        """Return the metrics of `weights`.

        Args:
            drawn: approximate number of generated images; None for all. sample: use a sample of the held-out images, not all.
        """
        self.evaluated.load_state_dict(weights)
        held_out = self.held_out[spread(range(len(self.held_out)), 96)] if sample else self.held_out
        figures = {**self.evaluate.held_out(self.evaluated, held_out), **self.evaluate(self.evaluated)}
        return figures if self.image_metrics is None else figures | self.image_metrics(drawn)

    def finish(self) -> dict[str, float]:
        """Save the averaged weights and plot the run; returns the metrics."""
        steps = self.recipe.schedule.steps
        weights = self.average or self.prior.folded(self.model)
        figures = self.figures(weights, None, sample=False)
        if not math.isfinite(figures["held_out_loss"]):
            found = figures["held_out_loss"]
            raise ValueError(f"the run in {self.folder} diverged (held-out loss {found}): lower the learning rates")
        self.run.log(steps, **figures, final_held_out_loss=figures["held_out_loss"], final_entropy=figures["entropy"])
        saved = LlamaGenTransformer.from_config(self.model.config)  # generation changed the weight layout of `evaluated`
        saved.load_state_dict(weights)
        with atomic_merge(self.folder / "transformer") as staged:
            saved.save_pretrained(staged)
        groups = tuple(self.evaluate.groups)
        measures = ("loss", "gap", *(("top5",) if self.image_metrics else ()))
        self.run.plot(("loss", "held_out_loss"), ("entropy",), *(tuple(f"{m}_{g}" for g in groups) for m in measures))
        return figures
