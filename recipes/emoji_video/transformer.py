"""Train a `CausalVideoTransformer`, a target or a small drafter: on clips, or to generate in few steps.

The average of the weights is saved.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.emoji_video.batches import ClipBatches, clip_latents, hash_encoder
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.generate import VideoEvaluation, sampling_settings
from recipes.emoji_video.losses import VideoLoss
from vargen.decoding.video.denoising import shifted_levels
from vargen.files import atomic_file
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.component_files import validate_network_files
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionBank
from vargen.training.optimizers import split_optimizers
from vargen.training.run import Trainer, export, fit
from vargen.weight_files import weights_digest

SAMPLING = "sampling.json"  # the settings of a run's model
OBJECTIVES = ("flow", "consistency")


@dataclass(frozen=True)
class VideoConfig:
    """How to train a `CausalVideoTransformer` on latents. `model` contains the keyword arguments of its constructor.

    With the objective "flow" it learns the velocity of data; with "consistency" it learns to reach the end of a teacher's flow
    in few steps.
    """

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    objective: str = "flow"
    seed: int = 0
    batch_size: int = 16  # clips
    max_caption_tokens: int = 20  # longer captions are truncated: one shape for all batches
    caption_dropout: float = 0.1
    motion_label_probability: float = 0.5  # of conditioning on a clip's motion level
    loop_shift_probability: float = 0.3  # of starting a loop at another block, which has no loss
    diffusion_forcing_fraction: float = 0.75  # first part of training: a noise level per block; then clean contexts
    context_noise: float = 0.2  # maximum noise on half of the clean contexts, because generated ones contain errors
    self_rollout_probability: float = 0.0  # of contexts that the model itself generates, in the last part
    motion_weight: float = 3.0  # additional loss weight of a place with average motion
    shift: float = 2.0  # of noise levels, toward noise
    levels: list[Any] = field(default_factory=lambda: [1000, 750, 500, 250])  # timesteps of few-step sampling, before the shift
    euler_steps: int = 16  # of sampling with a flow; consistency is learned between neighbors of them
    guidance: float = 2.0  # of sampling with a flow, and of a teacher's steps
    ema_decay: float = 0.999  # of the average of the weights
    optimizer: str = "muon"  # Muon for the matrices of blocks, AdamW for the rest; or "adamw" for all
    adamw_learning_rate: float = 2e-3
    adamw_beta2: float = 0.99
    weight_decay: float = 0.1
    compile: bool = False
    evaluate_every: int = 500
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_caption_tokens", "euler_steps", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "motion_weight", "guidance", "weight_decay", "adamw_learning_rate")
        validate_fractions(self, "caption_dropout", "motion_label_probability", "loop_shift_probability", "context_noise")
        validate_fractions(self, "diffusion_forcing_fraction", "self_rollout_probability", "ema_decay")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")
        shifted_levels(self.levels, self.shift)  # raises ValueError


def validate_video_fit(model: CausalVideoTransformer, vae: CausalVideoVAE, data: VideoDataset) -> None:
    """Raise ValueError unless the autoencoder's latents of the clips match the model's geometry, in whole blocks."""
    geometry, side = model.geometry, vae.latent_side
    for name, value, expected in (
        ("channels", geometry.channels, vae.config.latent_channels),
        ("height", geometry.height, side),
        ("width", geometry.width, side),
        ("temporal_stride", geometry.temporal_stride, vae.temporal_stride),
        ("spatial_stride", geometry.spatial_stride, vae.spatial_stride),
    ):
        if value != expected:
            raise ValueError(f"{name} must be the autoencoder's, {expected}, got {value}")
    if data.frames.shape[2] != vae.config.size:
        raise ValueError(f"frames must have the autoencoder's {vae.config.size} pixels, got {data.frames.shape[2]}")
    if data.frames.shape[1] % geometry.block_frames:
        raise ValueError(f"block_frames must divide the clips' {data.frames.shape[1]} frames, got {geometry.block_frames}")


def load_video_network(folder: Path, vae: CausalVideoVAE, data: VideoDataset, device: torch.device) -> CausalVideoTransformer:
    validate_network_files(folder, CausalVideoTransformer)
    model = CausalVideoTransformer.from_pretrained(folder).to(device).eval().requires_grad_(False)
    validate_video_fit(model, vae, data)
    return model


class VideoTrainer(Trainer):
    """Trains a video model; `average` is the exponential moving average of its weights."""

    def __init__(
        self,
        config: VideoConfig,
        data: VideoDataset,
        vae_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
        teacher_folder: Path | None,
        init_folder: Path | None,
    ):
        if (config.objective == "consistency") != (teacher_folder is not None):
            raise ValueError(
                f"teacher must be given for the objective 'consistency' and for no other, got {config.objective!r}"
            )
        validate_network_files(vae_folder, CausalVideoVAE)
        torch.manual_seed(config.seed)
        vae = CausalVideoVAE.from_pretrained(vae_folder).to(device).eval().requires_grad_(False)
        model = CausalVideoTransformer(**config.model).to(device)
        validate_video_fit(model, vae, data)
        identity = {"objective": config.objective, "vae": hash_encoder(vae)}
        teacher = None
        if teacher_folder is not None:
            teacher = load_video_network(teacher_folder, vae, data, device)
            identity["teacher"] = weights_digest(teacher)
        if init_folder is not None:
            start = load_video_network(init_folder, vae, data, device)
            identity["init"] = weights_digest(start)
            try:
                model.load_state_dict(start.state_dict())
            except RuntimeError:
                raise ValueError(f"init must have the shape in the config, got {init_folder}") from None
        elif teacher is not None and teacher.config.dim == model.config.dim:
            model.load_state_dict(teacher.state_dict())
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        super().__init__(config, model, folder, device, "video", **identity)
        latents = clip_latents(folder, data, vae, device)
        bank = CaptionBank(text_encoder_folder, config.max_caption_tokens, device)
        block, levels = model.geometry.block_frames, model.config.motion_levels
        self.batches = ClipBatches(data, latents, config, block, levels, device)
        self.evaluation = VideoEvaluation(data, latents, vae, bank, config, device)
        self.loss = VideoLoss(model, self.average, bank, config, teacher)
        optimizers = split_optimizers(dict(model.named_parameters()), lambda name: name.startswith("blocks."), config)
        self.optimizers = optimizers[::-1]  # the order in the checkpoints of earlier versions
        if config.compile:
            for network in (model, self.average, teacher):
                for block_ in network.blocks if network is not None else ():
                    block_.compile(dynamic=False)  # same shapes and code: compiled only once

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])

    def step(self, step: int) -> dict[str, Tensor]:
        loss, metrics = self.loss(step, self.batches(step))
        self.update(step, loss)
        self._update_average(step)
        return {"loss": loss.detach(), **metrics}

    @torch.no_grad()
    def _update_average(self, step: int) -> None:
        """Move the average toward the weights, faster in the first steps."""
        rate = 1 - min(self.config.ema_decay, (step + 1) / (step + 10))
        for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, rate)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of `VideoEvaluation`, and save generated clips to `samples.png`."""
        with torch.compiler.set_stance("force_eager"):  # rare, with shapes of its own: not worth compiling
            return self.evaluation(self.average, self.folder / "samples.png")


def train_video(
    config: VideoConfig,
    data: VideoDataset,
    vae_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    teacher_folder: Path | None = None,
    init_folder: Path | None = None,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the averaged weights to `folder/transformer`.

    Each evaluation saves generated clips to `folder/samples.png`: of training captions, then of held-out ones.

    Args:
        vae_folder: a saved `CausalVideoVAE`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        teacher_folder: a saved `CausalVideoTransformer`, the teacher of consistency; a model of the same width starts from its
            weights. init_folder: weights to start from instead.

    Returns:
        The metrics of `VideoEvaluation`.

    Raises:
        ValueError: if a saved network is damaged; if clips, autoencoder, model, teacher and objective are not compatible; if a
            run to resume has others of them; or if the run diverged.
    """
    folders = vae_folder, text_encoder_folder, folder
    trainer = VideoTrainer(config, data, *folders, device, teacher_folder, init_folder)
    fit(trainer)
    with atomic_file(folder / SAMPLING) as temporary:
        temporary.write_text(json.dumps(sampling_settings(config), indent=1) + "\n", "utf-8")
    panels = ("loss_seen", "loss_held_out"), ("motion", "held_out_motion", "static_fraction"), ("recall",)
    return export(trainer.run, trainer.average, "transformer", trainer.evaluate(), ("loss",), *panels)
