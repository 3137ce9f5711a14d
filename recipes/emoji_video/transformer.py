"""Train a `CausalVideoTransformer`, a target or a small drafter: on clips, or to come in few steps where a teacher comes in
many.

What is saved is the average of the weights.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.emoji_video.batches import Batches, clip_latents, encoder_digest
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.config import VideoConfig
from recipes.emoji_video.evaluation import Evaluation
from recipes.emoji_video.losses import Losses, drawing
from vargen.files import atomic_file, atomic_merge
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.component_files import check_network_files
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.caption_bank import CaptionBank
from vargen.training.optimizers import Muon
from vargen.training.run import TrainingRun
from vargen.weight_files import weights_digest

logger = logging.getLogger("vargen")

SAMPLING = "sampling.json"  # how the model of a run is drawn with


def optimizers(model: CausalVideoTransformer, recipe: VideoConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks; AdamW for embeddings, timesteps, modulation, head, norms and biases."""
    betas = (0.9, recipe.adamw_beta2)
    matrices = {n: p for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2}
    if recipe.optimizer == "adamw":
        matrices = {}
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    plain = torch.optim.AdamW(rest, recipe.adamw_learning_rate, betas, weight_decay=0.0, fused=True)
    made: list[torch.optim.Optimizer] = [plain]
    if matrices:
        made.append(Muon(matrices.values(), lr=recipe.schedule.learning_rate, weight_decay=recipe.weight_decay))
    return made


def check_video_fit(model: CausalVideoTransformer, vae: CausalVideoVAE, data: VideoDataset) -> None:
    """Raise ValueError unless the autoencoder's latents of the clips are those that the model draws, in whole blocks."""
    geometry, side = model.geometry, vae.latent_side
    for name, own, other in (
        ("channels", geometry.channels, vae.config.latent_channels),
        ("height", geometry.height, side),
        ("width", geometry.width, side),
        ("temporal_stride", geometry.temporal_stride, vae.temporal_stride),
        ("spatial_stride", geometry.spatial_stride, vae.spatial_stride),
    ):
        if own != other:
            raise ValueError(f"{name} must be the autoencoder's, {other}, got {own}")
    if data.frames.shape[2] != vae.config.size:
        raise ValueError(f"the autoencoder wants frames of {vae.config.size} pixels, the data set has {data.frames.shape[2]}")
    if data.frames.shape[1] % geometry.block_frames:
        raise ValueError(f"block_frames must divide the clips' {data.frames.shape[1]} frames, got {geometry.block_frames}")


def _opened(folder: Path, vae: CausalVideoVAE, data: VideoDataset, device: torch.device) -> CausalVideoTransformer:
    check_network_files(folder, CausalVideoTransformer)
    model = CausalVideoTransformer.from_pretrained(folder).to(device).eval().requires_grad_(False)
    check_video_fit(model, vae, data)
    return model


class _Networks:
    """The model, the average of its weights, a teacher, and what a run of them is known by."""

    def __init__(
        self,
        recipe: VideoConfig,
        data: VideoDataset,
        vae_folder: Path,
        device: torch.device,
        teacher_folder: Path | None,
        init_folder: Path | None,
    ):
        if (recipe.objective == "consistency") != (teacher_folder is not None):
            told = f"this one is {recipe.objective!r}"
            raise ValueError(f"teacher must be given for the objective 'consistency' and for no other; {told}")
        check_network_files(vae_folder, CausalVideoVAE)
        torch.manual_seed(recipe.seed)
        self.vae = CausalVideoVAE.from_pretrained(vae_folder).to(device).eval().requires_grad_(False)
        self.model = CausalVideoTransformer(**recipe.model).to(device)
        check_video_fit(self.model, self.vae, data)
        self.fingerprint: dict[str, Any] = {
            "kind": "video", "model": dict(recipe.model), "objective": recipe.objective, "seed": recipe.seed,
            "vae": encoder_digest(self.vae),
        }  # fmt: skip
        self.teacher = None
        if teacher_folder is not None:
            self.teacher = _opened(teacher_folder, self.vae, data, device)
            self.fingerprint["teacher"] = weights_digest(self.teacher)
        if init_folder is not None:
            start = _opened(init_folder, self.vae, data, device)
            self.fingerprint["init"] = weights_digest(start)
            try:
                self.model.load_state_dict(start.state_dict())
            except RuntimeError:
                raise ValueError(f"init must be of the recipe's shape, got {init_folder}") from None
        elif self.teacher is not None and self.teacher.config.dim == self.model.config.dim:
            self.model.load_state_dict(self.teacher.state_dict())
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)

    @torch.no_grad()
    def follow(self, step: int, decay: float) -> None:
        """The average follows the weights, at first faster."""
        share = 1 - min(decay, (step + 1) / (step + 10))
        for average, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(now, share)

    def compiled(self) -> None:
        for network in (self.model, self.average, self.teacher):
            for block in network.blocks if network is not None else ():
                block.compile(dynamic=False)  # of equal shape and code: compiled once for all


def train_video(
    recipe: VideoConfig,
    data: VideoDataset,
    vae_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    teacher_folder: Path | None = None,
    init_folder: Path | None = None,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the averaged weights land in `folder/transformer`.

    Args:
        vae_folder: a saved `CausalVideoVAE`. text_encoder_folder: holds `text_encoder/` and `tokenizer/`.
        teacher_folder: a saved `CausalVideoTransformer` whose flow consistency follows; the model starts from its weights where
            they are of the same width. init_folder: weights to start from instead.

    Raises:
        ValueError: if a saved network is damaged; if clips, autoencoder, model, teacher and objective do not fit each other;
            if a run that is resumed had others of them; if training diverges.

    At every evaluation, `folder/drawn.png` shows what it draws: training captions, then held-out ones. Returns the figures of
    `Evaluation`.
    """
    networks = _Networks(recipe, data, vae_folder, device, teacher_folder, init_folder)
    model, average = networks.model, networks.average
    run = TrainingRun(folder, networks.fingerprint, recipe.schedule.steps)
    state = run.resume(device)
    latents = clip_latents(folder, data, networks.vae, device)
    bank = CaptionBank(text_encoder_folder, recipe.caption_rows, device)
    batches = Batches(data, latents, recipe, model.geometry.block_frames, model.config.motion_levels, device)
    evaluate = Evaluation(data, latents, networks.vae, bank, recipe, device)
    losses = Losses(model, average, bank, recipe, networks.teacher)
    steppers = optimizers(model, recipe)
    if state:
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for stepper, saved in zip(steppers, state["optimizers"], strict=True):
            stepper.load_state_dict(saved)
    if recipe.compile:
        networks.compiled()

    def looked_at() -> dict[str, float]:
        with torch.compiler.set_stance("force_eager"):  # shapes of its own, seldom: not worth compiling
            return evaluate(average, folder / "drawn.png")

    model.train()
    for step in run.progress(state["step"] if state else 0):
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = stepper.defaults["lr"] * recipe.schedule.factor(step)
            stepper.zero_grad(set_to_none=True)
        loss, told = losses(step, batches(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        networks.follow(step, recipe.averaged)
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss.detach(), **told)
        if done % recipe.evaluate_every == 0 and done != recipe.schedule.steps:
            run.log(done, **looked_at())
        if done % recipe.checkpoint_every == 0 or done == recipe.schedule.steps:
            kept = {"model": model.state_dict(), "average": average.state_dict()}
            run.checkpoint(done, **kept, optimizers=[stepper.state_dict() for stepper in steppers])
    figures = looked_at()
    if not all(map(math.isfinite, figures.values())):
        raise ValueError(f"the run in {folder} diverged ({figures}): lower the learning rates")
    run.log(recipe.schedule.steps, **figures)
    with atomic_merge(folder / "transformer") as staged:
        average.save_pretrained(staged)
    with atomic_file(folder / SAMPLING) as temporary:
        temporary.write_text(json.dumps(drawing(recipe), indent=1) + "\n", "utf-8")
    run.plot(("loss",), ("loss_seen", "loss_held_out"), ("motion", "held_out_motion", "frozen"), ("recall",))
    logger.info("video %s: %s", folder, figures)
    return figures
