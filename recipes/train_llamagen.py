"""Train a LlamaGen on your captioned images, with a tokenizer of `train_tokenizer.py`, and write a folder that vargen opens.

    python recipes/train_llamagen.py --data my-images --tokenizer runs/tokenizer/vqvae --output runs/llamagen
    vargen generate --model runs/llamagen/model "a red apple"

The text encoder is that of a model that has one, the packaged `emoji` by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vargen.folders.tokenizers import load_tokenizer
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.llamagen import LLAMAGEN, LlamaGenPipeline
from vargen.pipelines.loading import read_model_folder
from vargen.training.dataset import CaptionedImages, load_captioned_images
from vargen.training.loop import Schedule
from vargen.training.low_resolution import GeneratorConfig, train_generator


def train_llamagen(
    data: CaptionedImages,
    tokenizer: Path,
    folder: Path,
    config: GeneratorConfig,
    device: torch.device,
    text_from: Path,
    **defaults: Any,
) -> dict[str, float]:
    """Train a generator in `folder`, resuming an unfinished run, and write the pipeline to `folder/model`.

    Args:
        tokenizer: a saved `VQModel`. text_from: a model folder with `text_encoder/` and `tokenizer/`.
        defaults: sampling settings of the pipeline, such as `guidance_scale`.
    """
    metrics = train_generator(config, data, tokenizer, text_from, folder, device)
    pipe = LlamaGenPipeline(
        vqvae=VQModel.from_pretrained(tokenizer),
        transformer=LlamaGenTransformer.from_pretrained(folder / "transformer"),
        text_encoder=MiniLMTextEncoder.from_pretrained(text_from / "text_encoder"),
        tokenizer=load_tokenizer(text_from / "tokenizer", "BertTokenizerFast"),
        defaults=defaults or None,
    )
    pipe.save_pretrained(folder / "model")
    return metrics


def main(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.npy and captions.jsonl.")],
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="A saved tokenizer.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The run. An unfinished one is resumed.")],
    text_from: Annotated[str, typer.Option(metavar="NAME|DIR", help="The model whose text encoder to use.")] = "emoji",
    layers: Annotated[int, typer.Option(metavar="N", help="Of the transformer.")] = 10,
    heads: Annotated[int, typer.Option(metavar="N", help="Of 32 channels each.")] = 7,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 4000,
    learning_rate: Annotated[float, typer.Option(metavar="R", help="Of Muon, for the matrices.")] = 5e-3,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images per step.")] = 32,
    guidance_scale: Annotated[float, typer.Option(metavar="S", help="Stored as the model's default.")] = 2.0,
    device: Annotated[str, typer.Option(metavar="NAME", help="Such as cpu or cuda.")] = "cpu",
) -> None:
    """Train a LlamaGen on your captioned images."""
    images, vqvae = load_captioned_images(data), VQModel.from_pretrained(tokenizer)
    model = {
        "dim": 32 * heads, "n_layer": layers, "n_head": heads, "vocab_size": vqvae.config.codebook_size,
        "grid_size": images.images.shape[1] // vqvae.downsampling, "caption_dim": 384, "cls_token_num": 32, "multiple_of": 128,
    }  # fmt: skip
    config = GeneratorConfig(model, Schedule(steps, learning_rate), batch_size=batch_size, wrong_prefix_probability=0.1)
    text = read_model_folder(text_from, LLAMAGEN).path
    print(train_llamagen(images, tokenizer, output, config, torch.device(device), text, guidance_scale=guidance_scale))


if __name__ == "__main__":
    typer.run(main)
