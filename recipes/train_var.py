"""Train a VAR on your captioned images, with a multi-scale tokenizer, and write a folder that vargen opens.

    python recipes/train_tokenizer.py --data my-images --output runs/scales --scales 1,2,3,4,6,8
    python recipes/train_var.py --data my-images --tokenizer runs/scales/vqvae --output runs/var
    vargen generate --model runs/var/model "a red apple"

With `--teacher runs/var/transformer`, a smaller model imitates that one, and the folder holds both: the small one generates the
late scales of `code` (CoDe, Chen et al. 2024, arXiv:2411.17787).

Shape suffixes: B images, E latent channels, R/G latent rows and columns, s side of a scale, T tokens of all scales.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from tqdm.auto import tqdm

from vargen.files import atomic_file
from vargen.folders.tokenizers import load_tokenizer
from vargen.models.guidance import Condition
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var.network import VARTransformer
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import read_model_folder
from vargen.pipelines.var import VARPipeline
from vargen.training.dataset import CaptionBank, CaptionedImages, load_captioned_images, take_evenly, to_pixels
from vargen.training.loop import Schedule, Trainer, at_least, export, fit, validate_fractions
from vargen.weight_files import weights_digest

_AT_ONCE = 16  # images that are encoded at once
_EVALUATED = 256  # validation images


@dataclass(frozen=True)
class NextScaleConfig:
    """How to train a `VARTransformer`. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64
    caption_dropout: float = 0.1
    max_caption_tokens: int = 16  # longer captions are truncated: one shape for all batches
    code_noise: float = 0.3  # maximum fraction of a scale's codes that are wrong; later scales learn to correct them
    adamw_learning_rate: float = 4e-3
    weight_decay: float = 0.2
    evaluate_every: int = 250
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_caption_tokens", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "adamw_learning_rate", "weight_decay")
        validate_fractions(self, "caption_dropout", "code_noise")


@torch.no_grad()
def load_or_encode(folder: Path, images: np.ndarray, vq: MultiScaleVQModel) -> np.ndarray:
    """Return the encoder's latents of uint8 images `[N, Y, X, 3]`, float16 `[N, E, R, G]`, stored in the folder of the run."""
    path = folder / f"latents-{weights_digest(vq.encoder, vq.quant_conv)}.npy"
    if path.is_file() and len(stored := np.load(path, allow_pickle=False)) == len(images):
        return stored
    parts = [
        vq.encode_latent(to_pixels(images[start : start + _AT_ONCE], vq.device)).half().cpu().numpy()
        for start in tqdm(range(0, len(images), _AT_ONCE), desc="latents", disable=None, mininterval=5)
    ]
    # In the layout that a file has: in another one, sums would differ in their last bits, and so would a resumed run.
    latents = np.ascontiguousarray(np.concatenate(parts))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        np.save(file, latents)
    return latents


@torch.no_grad()
def teacher_forcing(
    vq: MultiScaleVQModel, latents_BERG: Tensor, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return inputs of all scales but the first, `[B, T - 1, E]`, with wrong codes, and the targets that correct them `[B, T]`.

    Source: Han et al. 2024, "Infinity" (arXiv:2412.04431), section 3.4, with wrong codes instead of flipped bits. Per image and
    scale, a fraction of the codes, uniform from 0 to `noise`, is replaced by those of other places in the batch.
    """
    quantize, f_hat, inputs, targets = vq.quantize, torch.zeros_like(latents_BERG), [], []
    for k in range(len(vq.scales)):
        target = quantize.find_nearest(quantize.downsample(latents_BERG - f_hat, k), k)
        targets.append(target.flatten(1))
        if k + 1 == len(vq.scales):
            break
        fraction = noise * torch.rand(len(target), 1, 1, generator=generator)
        wrong = (torch.rand(target.shape, generator=generator) < fraction).to(target.device)
        order = torch.randperm(target.numel(), generator=generator).to(target.device)
        fed = torch.where(wrong, target.flatten()[order].view_as(target), target)
        f_hat = f_hat + quantize.lookup(fed, k)
        inputs.append(quantize.downsample(f_hat, k + 1).flatten(2).mT)
    return torch.cat(inputs, 1), torch.cat(targets, 1)


class NextScaleTrainer(Trainer):
    """Trains a next-scale model on images or, with a teacher, on its probabilities."""

    def __init__(
        self,
        config: NextScaleConfig,
        data: CaptionedImages,
        vq: MultiScaleVQModel,
        text_from: Path,
        folder: Path,
        device: torch.device,
        teacher: VARTransformer | None = None,
    ):
        torch.manual_seed(config.seed)
        model = VARTransformer(**{"condition": "text", **config.model})
        self.vq, self.teacher = vq.to(device).float().eval().requires_grad_(False), teacher
        if data.images.shape[1] != vq.image_size:
            raise ValueError(f"images must have the tokenizer's {vq.image_size} pixels, got {data.images.shape[1]}")
        for network in (model, *([teacher] if teacher else [])):
            if tuple(network.scales) != tuple(vq.scales) or network.config.vocab_size != vq.config.codebook_size:
                raise ValueError(f"scales and vocab_size must be the tokenizer's, {vq.scales} and {vq.config.codebook_size}")
        identity = {"tokenizer": weights_digest(vq)} | ({"teacher": weights_digest(teacher)} if teacher else {})
        super().__init__(config, model, folder, device, "var", **identity)
        self.data, self.latents = data, load_or_encode(folder, data.images, self.vq)
        self.bank = CaptionBank(text_from, config.max_caption_tokens, device)
        self.training = data.indices("train")
        self.validation = np.array(take_evenly(data.indices("validation").tolist(), _EVALUATED))
        # A scale counts in proportion to its side, not its area.
        self.weights = torch.cat([torch.full((side * side,), 1 / side, device=device) for side in vq.scales])
        blocks = {
            name: p for name, p in model.named_parameters()
            if name.startswith(("blocks.", "caption_")) and ".ada_lin." not in name and p.dim() == 2
        }  # fmt: skip
        others = [p for name, p in model.named_parameters() if name not in blocks]
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [
            torch.optim.Muon(blocks.values(), lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.adamw_learning_rate, betas=(0.9, 0.99), weight_decay=0.0),
        ]

    def step(self, step: int) -> dict[str, Tensor]:
        config = self.config
        rng, words = np.random.default_rng((config.seed, step)), random.Random(config.seed * 1_000_003 + step)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        chosen = self.training[rng.integers(0, len(self.training), config.batch_size)]
        dropped = torch.from_numpy(rng.random(len(chosen)) < config.caption_dropout).to(self.device)
        condition = self.bank([self.data.sample_caption(int(i), words) for i in chosen])
        assert condition.caption_mask is not None
        condition = Condition(caption_embeds=condition.caption_embeds, caption_mask=condition.caption_mask & ~dropped[:, None])
        losses = self.losses(chosen, condition, config.code_noise, generator)
        loss = (losses * self.weights).sum() / (self.weights.sum() * len(losses))
        self.update(step, loss)
        return {"loss": loss.detach(), "tokens": losses.detach().mean()}

    def losses(self, chosen: np.ndarray, condition: Condition, noise: float, generator: torch.Generator) -> Tensor:
        """Return the cross-entropy of each token in nats or, with a teacher, KL(teacher || model), `[B, T]`."""
        latents = torch.tensor(self.latents[chosen], dtype=torch.float32, device=self.device)
        inputs, targets = teacher_forcing(self.vq, latents, noise, generator)
        with self.amp():
            logits = self.model(inputs, condition).logits.float()
            if self.teacher is not None:
                with torch.no_grad():
                    expected = self.teacher(inputs, condition).logits.float().log_softmax(-1)
                return F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return `validation_loss`, and `wrong_caption_loss` under other images' captions, in nats per token, without noise."""
        self.model.eval()
        generator, sums = torch.Generator().manual_seed(0), {"validation_loss": 0.0, "wrong_caption_loss": 0.0}
        captions = [self.data.captions(int(i))[0] for i in self.validation]
        for name, texts in zip(sums, (captions, captions[1:] + captions[:1]), strict=True):
            for start in range(0, len(texts), self.config.batch_size):
                part = slice(start, start + self.config.batch_size)
                losses = self.losses(self.validation[part], self.bank(texts[part]), 0.0, generator)
                sums[name] += float(losses.mean(1).sum())
        return {name: value / len(captions) for name, value in sums.items()}


def train_var(
    data: CaptionedImages,
    tokenizer: Path,
    folder: Path,
    config: NextScaleConfig,
    device: torch.device,
    text_from: Path,
    teacher: Path | None = None,
    **defaults: Any,
) -> dict[str, float]:
    """Train a model in `folder`, resuming an unfinished run, and write the pipeline to `folder/model`.

    Args:
        tokenizer: a saved `MultiScaleVQModel`. text_from: a model folder with `text_encoder/` and `tokenizer/`.
        teacher: a saved `VARTransformer` to imitate, which becomes the transformer of the pipeline.
        defaults: sampling settings of the pipeline, such as `guidance_scale`.
    """
    vq, large = MultiScaleVQModel.from_pretrained(tokenizer), None
    if teacher is not None:
        large = VARTransformer.from_pretrained(teacher).to(device).eval().requires_grad_(False)
    trainer = NextScaleTrainer(config, data, vq, text_from, folder, device, large)
    fit(trainer)
    metrics = export(trainer.run, trainer.model, "transformer", trainer.evaluate())
    trained = VARTransformer.from_pretrained(folder / "transformer")
    pipe = VARPipeline(
        vqvae=vq.cpu(),
        transformer=trained if large is None else large.cpu(),
        draft_transformer=None if large is None else trained,
        text_encoder=MiniLMTextEncoder.from_pretrained(text_from / "text_encoder"),
        tokenizer=load_tokenizer(text_from / "tokenizer", "BertTokenizerFast"),
        defaults=defaults or None,
    )
    pipe.save_pretrained(folder / "model")
    return metrics


def main(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.npy and captions.jsonl.")],
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A saved multi-scale tokenizer.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The run. An unfinished one is resumed.")],
    teacher: Annotated[Path | None, typer.Option(metavar="DIR", help="A saved transformer to imitate.")] = None,
    text_from: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model whose text encoder to use.")] = "emoji",
    depth: Annotated[int, typer.Option(metavar="N", help="Blocks of the transformer.")] = 12,
    heads: Annotated[int, typer.Option(metavar="N", help="Of 32 channels each.")] = 8,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 2400,
    learning_rate: Annotated[float, typer.Option(metavar="R", help="Of Muon, for the matrices.")] = 6e-3,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images per step.")] = 64,
    guidance_scale: Annotated[float, typer.Option(metavar="S", help="Stored as the model's default.")] = 3.0,
    device: Annotated[str, typer.Option(metavar="NAME", help="Such as cpu or cuda.")] = "cpu",
) -> None:
    """Train a VAR on your captioned images."""
    images, vq = load_captioned_images(data), MultiScaleVQModel.from_pretrained(tokenizer)
    model = {
        "scales": vq.scales, "depth": depth, "dim": 32 * heads, "n_head": heads, "vocab_size": vq.config.codebook_size,
        "code_dim": vq.config.codebook_embed_dim, "caption_dim": 384, "caption_rows": 32, "shared_aln": True,
    }  # fmt: skip
    config = NextScaleConfig(model, Schedule(steps, learning_rate), batch_size=batch_size)
    text, place = read_model_folder(text_from, LLAMAGEN).path, torch.device(device)
    print(train_var(images, tokenizer, output, config, place, text, teacher, guidance_scale=guidance_scale))


if __name__ == "__main__":
    typer.run(main)
