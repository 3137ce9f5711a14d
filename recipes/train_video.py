"""Train a block-wise autoregressive video model on your captioned clips, and write a folder that vargen opens.

    python recipes/train_video.py vae --data my-clips --output runs/vae
    python recipes/train_video.py flow --data my-clips --vae runs/vae/vae --output runs/flow
    python recipes/train_video.py few-step --data my-clips --vae runs/vae/vae --teacher runs/flow/transformer --output runs/few
    vargen generate --model runs/few/model "a bouncing ball"

A data set is a folder of `clips.npy`, uint8 `[N, frames, size, size, 3]`, and `captions.jsonl`, a `{"caption": ...}` for each.
First an autoencoder of frames, then the flow of its latents (diffusion forcing, Chen et al. 2024, arXiv:2407.01392, then clean
blocks before noisy ones), then a model that needs few steps, by consistency with the flow (Song et al. 2023, arXiv:2303.01469).

Shape suffixes: B clips, F frames, C latent channels, Y/X rows and columns.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean, shift_level, shifted_levels
from vargen.files import atomic_file
from vargen.folders.tokenizers import load_tokenizer
from vargen.models.causal_video.cache import TextCache
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import read_model_folder
from vargen.training.dataset import CaptionBank
from vargen.training.loop import Schedule, Trainer, at_least, export, fit, validate_fractions
from vargen.weight_files import weights_digest

_AT_ONCE = 8  # clips that are encoded at once
_HELD_OUT = 20  # every twentieth clip is for validation
_HUBER = 0.1  # below it, errors of latents count squared, above it linearly
_EULER_STEPS = 16  # of the flow; consistency is learned between neighbors of them
_STEPS = (1000, 750, 500, 250)  # timesteps of few-step sampling, before the shift
_TEXT_ROWS = 24


@dataclass(frozen=True)
class Clips:
    """Clips uint8 `[N, F, Y, X, 3]`, memory-mapped, and a caption for each."""

    frames: np.ndarray
    captions: list[str]

    @property
    def validation(self) -> np.ndarray:
        return np.arange(_HELD_OUT - 1, len(self.frames), _HELD_OUT)

    @property
    def training(self) -> np.ndarray:
        return np.setdiff1d(np.arange(len(self.frames)), self.validation)


@dataclass(frozen=True)
class VideoConfig:
    """How to train an autoencoder of frames or a transformer. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 16  # clips
    window: int = 6  # of the autoencoder: consecutive frames of a clip
    caption_dropout: float = 0.1
    context_noise: float = 0.2  # maximum noise on half of the clean contexts, because generated ones contain errors
    shift: float = 2.0  # of noise levels, toward noise
    guidance: float = 2.0  # of the teacher
    ema_decay: float = 0.99  # of the average of a transformer's weights, which is saved
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every", "shift")
        at_least(self, 2, "window")
        validate_fractions(self, "caption_dropout", "context_noise", "ema_decay")


def load_clips(folder: Path) -> Clips:
    """Load a data set; ValueError if its files do not belong together, or are too few for a validation clip."""
    frames = np.load(folder / "clips.npy", mmap_mode="r", allow_pickle=False)
    captions = [json.loads(line)["caption"] for line in (folder / "captions.jsonl").read_text("utf-8").splitlines()]
    if frames.ndim != 5 or frames.dtype != np.uint8 or frames.shape[4] != 3 or len(frames) != len(captions):
        raise ValueError(f"{folder}: clips.npy must be uint8 [N, F, size, size, 3] with N captions, got {list(frames.shape)}")
    if len(frames) < _HELD_OUT:
        raise ValueError(f"{folder} must have at least {_HELD_OUT} clips, got {len(frames)}")
    return Clips(frames, captions)


def to_video(frames: np.ndarray, device: torch.device) -> Tensor:
    """Convert uint8 `[B, F, Y, X, 3]` to float32 `[B, F, 3, Y, X]` in [-1, 1]."""
    return torch.from_numpy(np.array(frames)).to(device).movedim(-1, 2).contiguous().float() / 127.5 - 1


class AutoencoderTrainer(Trainer):
    """Trains an autoencoder on windows of clips.

    The loss includes differences of consecutive frames: otherwise static edges flicker. Noise on the latents keeps the decoder
    from depending on details that a generator cannot reproduce.
    """

    def __init__(self, config: VideoConfig, data: Clips, folder: Path, device: torch.device):
        torch.manual_seed(config.seed)
        super().__init__(config, CausalVideoVAE(**config.model), folder, device, "video-vae")
        if data.frames.shape[2] != self.model.config.size:
            raise ValueError(f"size must be the clips' {data.frames.shape[2]} pixels, got {self.model.config.size}")
        self.data, rate = data, config.schedule.learning_rate
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), rate, (0.9, 0.99), weight_decay=config.weight_decay)]

    def step(self, step: int) -> dict[str, Tensor]:
        config, training = self.config, self.data.training
        rng = np.random.default_rng((config.seed, step))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        windows = []
        for index in training[rng.integers(0, len(training), config.batch_size)]:
            start = int(rng.integers(0, max(1, self.data.frames.shape[1] - config.window + 1)))
            window = self.data.frames[index, start : start + config.window]
            windows.append(window[:, :, ::-1] if rng.random() < 0.5 else window)
        pixels = to_video(np.stack(windows), self.device)
        with self.amp():
            mean, log_variance = self.model.encode_moments(pixels)
            noise, more = (torch.randn(mean.shape, generator=generator).to(mean) for _ in range(2))
            strength = 0.2 * torch.rand(len(mean), generator=generator) * (torch.rand(len(mean), generator=generator) < 0.5)
            scale = mean.detach().std((0, 1, 3, 4))[:, None, None] * strength.to(mean)[:, None, None, None, None]
            decoded, _ = self.model.decoder(mean + (log_variance / 2).exp() * noise + scale * more)
        error = decoded.float() - pixels
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        reconstruction = error.abs().mean() + 2 * error.square().mean() + 0.5 * edges
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().mean()
        loss = reconstruction + error.diff(dim=1).abs().mean() + 3e-4 * divergence
        self.update(step, loss)
        return {"loss": loss.detach(), "reconstruction": reconstruction.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return `psnr` of validation clips, mean over frames in dB, without noise."""
        self.model.eval()
        pixels = to_video(self.data.frames[self.data.validation[:_AT_ONCE]], self.device)
        mean, _ = self.model.encode_moments(pixels)
        error = (self.model.decoder(mean)[0].float().clamp(-1, 1) - pixels) / 2
        return {"psnr": float((-10 * error.square().mean((2, 3, 4)).clamp_min(1e-10).log10()).mean())}

    @torch.no_grad()
    def fit_standardization(self) -> None:
        """Set the statistics by which latents of training clips get mean 0 and variance 1 per channel."""
        self.model.eval()
        frames = self.data.frames[self.data.training[:256], ::4]  # consecutive frames are similar
        parts = [
            self.model.encode_moments(to_video(frames[start : start + _AT_ONCE], self.device))[0]
            for start in range(0, len(frames), _AT_ONCE)
        ]
        channels = torch.cat(parts).double().movedim(2, 0).flatten(1)
        self.model.latent_mean.copy_(channels.mean(1))
        self.model.latent_std.copy_(channels.std(1).clamp_min(1e-4))


@torch.no_grad()
def load_or_encode(folder: Path, data: Clips, vae: CausalVideoVAE, device: torch.device) -> np.ndarray:
    """Return the standardized latents of all clips, float16 `[N, F, C, Y, X]`, stored in the folder of the run."""
    path = folder / f"latents-{weights_digest(vae)}.npy"
    if path.is_file() and len(stored := np.load(path, allow_pickle=False)) == len(data.frames):
        return stored
    parts = [
        vae.encode(to_video(data.frames[start : start + _AT_ONCE], device)).half().cpu().numpy()
        for start in range(0, len(data.frames), _AT_ONCE)
    ]
    # In the layout that a file has: in another one, sums would differ in their last bits, and so would a resumed run.
    latents = np.ascontiguousarray(np.concatenate(parts))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, latents)
    return latents


class VideoTrainer(Trainer):
    """Trains a transformer on the flow of latents or, with a teacher, to reach the end of its flow in few steps.

    Attributes:
        average: the exponential moving average of the weights, which is the target of consistency, and is saved.
    """

    def __init__(
        self,
        config: VideoConfig,
        data: Clips,
        vae: CausalVideoVAE,
        text_from: Path,
        folder: Path,
        device: torch.device,
        teacher: CausalVideoTransformer | None = None,
    ):
        torch.manual_seed(config.seed)
        model = CausalVideoTransformer(**config.model).to(device)
        self.teacher, self.block = teacher, model.geometry.block_frames
        if data.frames.shape[1] % self.block:
            raise ValueError(f"block_frames must divide the clips' {data.frames.shape[1]} frames, got {self.block}")
        if teacher is not None and teacher.config.dim == model.config.dim:
            model.load_state_dict(teacher.state_dict())
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        identity = {"vae": weights_digest(vae)} | ({"teacher": weights_digest(teacher)} if teacher else {})
        super().__init__(config, model, folder, device, "video", **identity)
        self.data, self.latents = data, load_or_encode(folder, data, vae.to(device).eval().requires_grad_(False), device)
        self.bank = CaptionBank(text_from, _TEXT_ROWS, device)
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), rate, (0.9, 0.99), weight_decay=decay)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])

    def step(self, step: int) -> dict[str, Tensor]:
        config, training = self.config, self.data.training
        rng = np.random.default_rng((config.seed, step))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        chosen = training[rng.integers(0, len(training), config.batch_size)]
        texts = ["" if rng.random() < config.caption_dropout else self.data.captions[i] for i in chosen]
        loss = self.loss(chosen, texts, generator, forcing=step < 0.75 * config.schedule.steps)
        self.update(step, loss)
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(weight, 1 - min(config.ema_decay, (step + 1) / (step + 10)))
        return {"loss": loss.detach()}

    def loss(self, chosen: np.ndarray, texts: list[str], generator: torch.Generator, forcing: bool) -> Tensor:
        """Return the loss of clips; with `forcing`, a flow learns noise levels per block without clean contexts."""
        clean = torch.tensor(self.latents[chosen], dtype=torch.float32, device=self.device)
        noise, other = (torch.randn(clean.shape, generator=generator).to(clean) for _ in range(2))
        strength = self.config.context_noise * torch.rand(len(clean), generator=generator)
        strength = strength * (torch.rand(len(clean), generator=generator) < 0.5)
        context = add_noise(clean, other, strength.to(clean)[:, None, None, None, None])
        with self.amp():
            if self.teacher is not None:
                return self.consistency_loss(self.teacher, clean, noise, context, texts, generator)
            level = torch.randn(len(clean), clean.shape[1] // self.block, generator=generator).sigmoid()
            level = (self.config.shift * level / (1 + (self.config.shift - 1) * level)).to(clean)
            level = level.repeat_interleave(self.block, 1)
            noisy, text = add_noise(clean, noise, level[..., None, None, None]), self.text(self.model, texts)
            velocity = self.model(noisy, level * TIMESTEPS, text, context=None if forcing else context)
        return (velocity.float() - (noise - clean)).square().mean()

    def consistency_loss(
        self,
        teacher: CausalVideoTransformer,
        clean: Tensor,
        noise: Tensor,
        context: Tensor,
        texts: list[str],
        generator: torch.Generator,
    ) -> Tensor:
        """Return the distance of the prediction at a level from the average's at the next level of the teacher's flow."""
        grid = torch.tensor([shift_level(1 - i / _EULER_STEPS, self.config.shift) for i in range(_EULER_STEPS)] + [0.0])
        index = torch.randint(_EULER_STEPS, (len(clean), clean.shape[1] // self.block), generator=generator)
        now, following = (grid[i].repeat_interleave(self.block, 1).to(clean) for i in (index, index + 1))
        noisy = add_noise(clean, noise, now[..., None, None, None])

        def predict(network: CausalVideoTransformer, x: Tensor, level: Tensor) -> Tensor:
            velocity = network(x, level * TIMESTEPS, self.text(network, texts), context=context).float()
            return predict_clean(x, velocity, level[..., None, None, None])

        with torch.no_grad():
            velocity, plain = (
                teacher(noisy, now * TIMESTEPS, self.text(teacher, given), context=context).float()
                for given in (texts, [""] * len(texts))
            )
            guided = plain + self.config.guidance * (velocity - plain)
            nearer = noisy + (following - now)[..., None, None, None] * guided
            target = predict(self.average, nearer, following)
        error = predict(self.model, noisy, now) - target
        return ((error.square() + _HUBER**2).sqrt() - _HUBER).mean()

    def text(self, network: CausalVideoTransformer, texts: list[str]) -> TextCache:
        """Return a network's text cache of captions."""
        condition = self.bank(texts)
        assert condition.caption_embeds is not None
        return network.text_cache(condition.caption_embeds, condition.caption_mask)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return `validation_loss`, of clips that training does not see."""
        chosen = self.data.validation[: self.config.batch_size]
        texts = [self.data.captions[i] for i in chosen]
        self.model.eval()
        return {"validation_loss": float(self.loss(chosen, texts, torch.Generator().manual_seed(0), forcing=False))}


def train_autoencoder(data: Clips, folder: Path, config: VideoConfig, device: torch.device) -> dict[str, float]:
    """Train an autoencoder, resuming an unfinished run; saves it to `folder/vae`."""
    trainer = AutoencoderTrainer(config, data, folder, device)
    fit(trainer)
    trainer.fit_standardization()
    return export(trainer.run, trainer.model, "vae", trainer.evaluate())


def train_video(
    data: Clips,
    vae: Path,
    folder: Path,
    config: VideoConfig,
    device: torch.device,
    text_from: Path,
    teacher: Path | None = None,
) -> dict[str, float]:
    """Train a transformer, resuming an unfinished run, and write the pipeline to `folder/model`."""
    codec, flow = CausalVideoVAE.from_pretrained(vae), None
    if teacher is not None:
        flow = CausalVideoTransformer.from_pretrained(teacher).to(device).eval().requires_grad_(False)
    trainer = VideoTrainer(config, data, codec, text_from, folder, device, flow)
    fit(trainer)
    metrics = export(trainer.run, trainer.average, "transformer", trainer.evaluate())
    levels = [shift_level(1 - i / _EULER_STEPS, config.shift) for i in range(_EULER_STEPS)]
    defaults = {"levels": levels, "euler": True, "guidance": config.guidance}
    if flow is not None:
        defaults = {"levels": list(shifted_levels(_STEPS, config.shift)), "euler": False, "guidance": 1.0}
    pipe = CausalVideoPipeline(
        vae=codec.cpu(),
        transformer=trainer.average.cpu(),
        text_encoder=MiniLMTextEncoder.from_pretrained(text_from / "text_encoder"),
        tokenizer=load_tokenizer(text_from / "tokenizer", "BertTokenizerFast"),
        defaults={**defaults, "image": False, "num_blocks": data.frames.shape[1] // trainer.block},
    )
    pipe.save_pretrained(folder / "model")
    return metrics


app = typer.Typer(help="Train a block-wise autoregressive video model on your captioned clips.", no_args_is_help=True)
Data = Annotated[Path, typer.Option(metavar="DIR", help="Folder of clips.npy and captions.jsonl.")]
Output = Annotated[Path, typer.Option(metavar="DIR", help="The run. An unfinished one is resumed.")]
Vae = Annotated[Path, typer.Option(metavar="DIR", help="A saved autoencoder.")]
Teacher = Annotated[Path, typer.Option(metavar="DIR", help="A transformer that `flow` saved.")]
Steps = Annotated[int, typer.Option(metavar="N", help="Training steps.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="Such as cpu or cuda.")]
Text = Annotated[str, typer.Option(metavar="NAME|DIR", help="The model whose text encoder to use.")]


@app.command()
def vae(data: Data, output: Output, steps: Steps = 6800, learning_rate: float = 2e-3, device: Device = "cpu") -> None:
    """Train the autoencoder."""
    clips = load_clips(data)
    model = {"size": clips.frames.shape[2], "widths": [64, 128, 192], "conv_blocks": 1, "transformer_blocks": 2}
    config = VideoConfig(model, Schedule(steps, learning_rate))
    print(train_autoencoder(clips, output, config, torch.device(device)))


@app.command()
def flow(
    data: Data,
    vae: Vae,
    output: Output,
    layers: Annotated[int, typer.Option(metavar="N", help="Of the transformer.")] = 8,
    heads: Annotated[int, typer.Option(metavar="N", help="Of 32 channels each.")] = 7,
    steps: Steps = 7000,
    learning_rate: float = 1e-3,
    text_from: Text = "emoji",
    device: Device = "cpu",
) -> None:
    """Train the flow of latents."""
    codec = CausalVideoVAE.from_pretrained(vae)
    model = {
        "dim": 32 * heads, "ffn_dim": 128 * heads, "num_heads": heads, "num_layers": layers,
        "channels": codec.config.latent_channels, "height": codec.latent_side, "width": codec.latent_side, "patch": 2,
        "block_frames": 4, "spatial_stride": codec.spatial_stride, "temporal_stride": codec.temporal_stride,
        "fps": codec.config.fps, "text_dim": 384, "text_len": _TEXT_ROWS, "text_mask": True, "freq_dim": 128,
    }  # fmt: skip
    config = VideoConfig(model, Schedule(steps, learning_rate), ema_decay=0.999, weight_decay=0.1)
    text = read_model_folder(text_from, LLAMAGEN).path
    print(train_video(load_clips(data), vae, output, config, torch.device(device), text))


@app.command()
def few_step(
    data: Data,
    vae: Vae,
    teacher: Teacher,
    output: Output,
    steps: Steps = 900,
    learning_rate: float = 3e-4,
    text_from: Text = "emoji",
    device: Device = "cpu",
) -> None:
    """Train a model that needs few steps, from the flow of `--teacher`."""
    model = dict(CausalVideoTransformer.load_config(teacher))
    shape = {name: value for name, value in model.items() if not name.startswith("_")}
    config = VideoConfig(shape, Schedule(steps, learning_rate), seed=1, weight_decay=0.0)
    text = read_model_folder(text_from, LLAMAGEN).path
    print(train_video(load_clips(data), vae, output, config, torch.device(device), text, teacher))


if __name__ == "__main__":
    app()
