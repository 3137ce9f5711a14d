"""Train a `VARTransformer` on captioned pictures, or a small one to draw the late scales as a large one would.

The large one learns by self-corrected teacher forcing (`self_correction`), a scale counting with its side; more pictures a
step are learned at their first scales alone, which decide what a picture is of and cost a quarter. The small one (CoDe, Chen et
al. 2024, arXiv:2411.17787) first imitates its teacher's probs at all scales, then at the last ones only, on histories that the
teacher has drawn.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.config import NextScaleConfig
from recipes.emoji_var.data import Batch, Batches, LatentStore
from recipes.emoji_var.evaluation import Evaluation
from recipes.emoji_var.generate import draw_sheet, draw_tokens
from recipes.emoji_var.losses import distillation, scale_weights
from recipes.emoji_var.self_correction import Corrector
from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.component_files import check_network_files
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import VARTransformer
from vargen.training.caption_bank import CaptionBank
from vargen.training.head_loss import head_loss
from vargen.training.optimizers import Muon
from vargen.training.run import TrainingRun
from vargen.weight_files import weights_digest

logger = logging.getLogger("vargen")

_HISTORY_GUIDANCE = 1.5  # of histories that a teacher draws


def var_optimizers(model: VARTransformer, recipe: NextScaleConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks and caption projections; AdamW for embeddings, modulation, head, norms and biases."""
    inside = ("blocks.", "caption_")
    matrices = {n: p for n, p in model.named_parameters() if n.startswith(inside) and p.dim() == 2 and ".ada_lin." not in n}
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    betas = (0.9, recipe.adamw_beta2)
    return [
        Muon(matrices.values(), lr=recipe.schedule.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adamw_learning_rate, betas=betas, weight_decay=0.0, fused=True),
    ]


def tokenizer_digest(vq: MultiScaleVQModel) -> str:
    """Changes with whatever decides about tokens: encoder, codes, convolutions and gains; not with the decoder."""
    gains = torch.nn.Module()
    gains.register_buffer("gains", torch.tensor([float(vq.quantize.gain(k)) for k in range(len(vq.scales))]))
    return weights_digest(vq.encoder, vq.quant_conv, vq.quantize.embedding, vq.quantize.quant_resi, gains)


def check_var_fit(model: VARTransformer, vq: MultiScaleVQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square pictures of `side` pixels are those that the model draws."""
    if side != vq.image_size:
        raise ValueError(f"the tokenizer wants pictures of {vq.image_size} pixels, the data set has {side}")
    for name, own, other in (
        ("scales", tuple(model.scales), tuple(vq.scales)),
        ("vocab_size", model.config.vocab_size, vq.config.codebook_size),
        ("code_dim", model.config.code_dim, vq.config.codebook_embed_dim),
    ):
        if own != other:
            raise ValueError(f"{name} must be the tokenizer's, {other}, got {own}")


class Losses:
    """The loss of a step, made from pictures alone or with a teacher."""

    def __init__(self, model: VARTransformer, vq: MultiScaleVQModel, recipe: NextScaleConfig, teacher: VARTransformer | None):
        self.model, self.vq, self.recipe, self.teacher = model, vq, recipe, teacher
        self.correct = Corrector(vq, recipe.code_noise)
        self.dtype = preferred_dtype(model.device)
        self.weights = scale_weights(model.scales, model.device)
        if recipe.compile:
            for block in model.blocks:
                block.compile(dynamic=False)  # of equal shape and code: compiled once, for all scales and for the early ones

    def __call__(self, step: int, batches: Batches) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and figures to log, by (seed, step) alone."""
        recipe = self.recipe
        draw = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        full = batches(step, recipe.batch_size)
        if self.teacher is None:
            return self.of_pictures(full, batches(step, recipe.early_batch_size, 1) if recipe.early_batch_size else None, draw)
        late = step >= recipe.all_scales * recipe.schedule.steps
        return self.of_late_scales(full, draw) if late else self.of_all_scales(full, draw)

    def of_pictures(self, full: Batch, early: Batch | None, draw: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy over all scales of some pictures and the first scales of others, averaged by weight."""
        ends, count = self.model.ends, min(self.recipe.early_scales, len(self.model.scales))
        total, each = self._cross_entropy(full, draw, len(self.model.scales))
        weight = self.weights.sum() * len(full.texts)
        if early is not None:
            more, _ = self._cross_entropy(early, draw, count)
            total = total + more
            weight = weight + self.weights[: ends[count - 1]].sum() * len(early.texts)
        means = each.mean(0)
        early_end = ends[count - 1]
        return total / weight, {"tokens": means.mean(), "early": means[:early_end].mean(), "first": means[: ends[0]].mean()}

    def _cross_entropy(self, batch: Batch, draw: torch.Generator, scales: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.correct(batch.latents, draw, scales)
        with self._amp():
            features = self.model.hidden(inputs, batch.condition)
        head = self.model.head
        return head_loss(head.weight, head.bias, features.float(), targets, self.weights[: targets.shape[1]], self.dtype)

    def of_all_scales(self, batch: Batch, draw: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The teacher's probs at every scale."""
        inputs, _ = self.correct(batch.latents, draw)
        logits, teacher = self._both(inputs, batch, None)
        loss = distillation(logits, teacher, self.weights) / (self.weights.sum() * len(batch.texts))
        divergence = distillation(logits.detach(), teacher, torch.ones_like(self.weights)) / logits[..., 0].numel()
        return loss, {"divergence": divergence}

    def of_late_scales(self, batch: Batch, draw: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The teacher's probs at the last scales: half on its own histories, half on self-corrected ones with their codes."""
        assert self.teacher is not None
        scales = min(self.recipe.late_scales, len(self.model.scales) - 1)
        half = len(batch.texts) // 2
        inputs, targets = self.correct(batch.latents, draw)
        drawn = draw_tokens(
            self.teacher, self.vq, batch.condition.rows(slice(0, half)), draw, _HISTORY_GUIDANCE,
            scales=len(self.model.scales) - 1,
        ) if half else []  # fmt: skip
        if half:
            f_hat, rows = self.vq.empty_latent(half), []
            for k, tokens in enumerate(drawn):
                f_hat, following = self.vq.next_input(f_hat, tokens, k)
                rows.append(following)
            inputs = torch.cat([torch.cat(rows, 1).to(inputs), inputs[half:]])  # type: ignore[arg-type]
        logits, teacher = self._both(inputs, batch, scales)
        weights = self.weights[-logits.shape[1] :]
        loss = distillation(logits, teacher, weights) / (weights.sum() * len(batch.texts))
        right = targets[half:, -logits.shape[1] :]
        nats = nn.functional.cross_entropy(logits[half:].flatten(0, 1), right.flatten(), reduction="none").view(right.shape)
        own = (nats * weights).sum() / (weights.sum() * len(right))
        divergence = distillation(logits.detach(), teacher, torch.ones_like(weights)) / logits[..., 0].numel()
        return loss + self.recipe.cross_entropy * own, {"late_divergence": divergence, "late": nats.detach().mean()}

    def _both(self, inputs: Tensor, batch: Batch, scales: int | None) -> tuple[Tensor, Tensor]:
        """Logits of model and teacher at the last `scales`."""
        assert self.teacher is not None
        with self._amp():
            logits = self.model(inputs, batch.condition, logits_of=scales).logits
            with torch.no_grad():
                teacher = self.teacher(inputs, batch.condition, logits_of=scales).logits
        return logits, teacher

    def _amp(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def _initial_model(recipe: NextScaleConfig, init_folder: Path | None) -> tuple[VARTransformer, str | None]:
    """The model to train, and the digest of the weights that it starts from.

    Raises:
        ValueError: if these are damaged or of another shape than the recipe's.
    """
    options = {"condition": "text", **recipe.model}
    model = VARTransformer(**options)
    if init_folder is None:
        return model, None
    check_network_files(init_folder, VARTransformer)
    given = VARTransformer.from_pretrained(init_folder)
    other = {name: given.config[name] for name in options if given.config[name] != model.config[name]}
    if other:
        asked = {name: model.config[name] for name in other}
        raise ValueError(f"init {str(init_folder)!r} holds a model of {other}, and the recipe asks for {asked}")
    model.load_state_dict(given.state_dict())
    return model, weights_digest(given)


def train_next_scale(
    recipe: NextScaleConfig,
    data: EmojiDataset,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    teacher_folder: Path | None = None,
    init_folder: Path | None = None,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the last weights land in `folder/transformer`.

    Args:
        tokenizer_folder: a saved `MultiScaleVQModel`. text_encoder_folder: holds `text_encoder/` and `tokenizer/`.
        teacher_folder: a saved `VARTransformer` to imitate. init_folder: a saved one of the recipe's shape to start from.

    Raises:
        ValueError: if a saved network is damaged; if data set, tokenizer, model and teacher do not fit each other; if a run
            that is resumed had another tokenizer or teacher; if training diverges.

    At every evaluation, `folder/drawn.png` shows what it draws. Returns the figures of `Evaluation`.
    """
    check_network_files(tokenizer_folder, MultiScaleVQModel)
    if teacher_folder is not None:
        check_network_files(teacher_folder, VARTransformer)
    torch.manual_seed(recipe.seed)
    model, init = _initial_model(recipe, init_folder)
    model = model.to(device)
    vq = MultiScaleVQModel.from_pretrained(tokenizer_folder).to(device).eval().requires_grad_(False)
    check_var_fit(model, vq, data.images.shape[1])
    teacher = None
    if teacher_folder is not None:
        teacher = VARTransformer.from_pretrained(teacher_folder).to(device).eval().requires_grad_(False)
        check_var_fit(teacher, vq, data.images.shape[1])
    fingerprint = {"kind": "var", "model": dict(recipe.model), "seed": recipe.seed, "tokenizer": tokenizer_digest(vq)}
    if teacher is not None:
        fingerprint["teacher"] = weights_digest(teacher)
    if init is not None:
        fingerprint["init"] = init
    run = TrainingRun(folder, fingerprint, recipe.schedule.steps)
    state: dict[str, Any] | None = run.resume(device)
    store = LatentStore(folder, data.images, vq, recipe, device)
    bank = CaptionBank(text_encoder_folder, recipe.caption_rows, device)
    evaluate = Evaluation(data, recipe.focus, store, bank, min(recipe.early_scales, len(vq.scales)))
    batches, losses = Batches(data, store, bank, recipe), Losses(model, vq, recipe, teacher)
    steppers = var_optimizers(model, recipe)
    if state:
        model.load_state_dict(state["model"])
        for stepper, saved in zip(steppers, state["optimizers"], strict=True):
            stepper.load_state_dict(saved)

    def looked_at() -> dict[str, float]:
        with torch.compiler.set_stance("force_eager"):  # shapes of its own, seldom: not worth compiling
            figures = evaluate(model.eval())
            draw_sheet(model, vq, bank, folder / "drawn.png")
        model.train()
        return figures

    model.train()
    for step in run.progress(state["step"] if state else 0):
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = stepper.defaults["lr"] * recipe.schedule.factor(step)
            stepper.zero_grad(set_to_none=True)
        loss, told = losses(step, batches)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss.detach(), **told)
        if done % recipe.evaluate_every == 0 and done != recipe.schedule.steps:
            run.log(done, **looked_at())
        if done % recipe.checkpoint_every == 0 or done == recipe.schedule.steps:
            run.checkpoint(done, model=model.state_dict(), optimizers=[stepper.state_dict() for stepper in steppers])
    figures = looked_at()
    if not all(map(math.isfinite, figures.values())):
        raise ValueError(f"the run in {folder} diverged ({figures}): lower the learning rates")
    run.log(recipe.schedule.steps, **figures)
    with atomic_merge(folder / "transformer") as staged:
        model.eval().save_pretrained(staged)
    groups = ("seen", "styles", "concepts")
    run.plot(("loss", "tokens", "early"), *(tuple(f"{figure}_{name}" for name in groups) for figure in ("loss", "rank", "gap")))
    logger.info("var %s: %s", folder, figures)
    return figures
