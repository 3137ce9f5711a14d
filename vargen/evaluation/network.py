"""Networks to measure: the transformer of a checkpoint, or one of an official size with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch

from vargen.decoding import Sampling
from vargen.models.llamagen import SIZES, Condition, LlamaGenTransformer
from vargen.pipelines.loading import checked_folder

RANDOM_MODELS = {f"llamagen-{size.lower()}": size for size in SIZES}


@dataclass(frozen=True)
class Network:
    """A transformer to measure, and the sampling that its checkpoint asks for."""

    name: str
    transformer: LlamaGenTransformer
    guidance_scale: float = 4.0
    sampling: Sampling = field(default_factory=Sampling)


def check_network(name: str) -> None:
    """Raise ValueError unless `open_network` can open `name`; reads no weight."""
    if name not in RANDOM_MODELS:
        checked_folder(name, "LlamaGenPipeline", {})


def open_network(name: str, dtype: torch.dtype, device: torch.device) -> Network:
    """The transformer of a pipeline folder, a packaged or a hub model; or one of an official size with random weights.

    Raises:
        ValueError: if it is none of these; see `checked_folder`.
    """
    if name in RANDOM_MODELS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformer = LlamaGenTransformer(**SIZES[RANDOM_MODELS[name]])
            torch.nn.init.normal_(transformer.output.weight, std=0.02)  # starts at zero, for training
        return Network(name, transformer.to(device, dtype).eval())
    folder = checked_folder(name, "LlamaGenPipeline", {})
    stored = json.loads((folder / "model_index.json").read_text()).get("defaults") or {}
    stored = {key: value for key, value in stored.items() if value is not None}
    guidance = float(stored.pop("guidance_scale", 4.0))
    transformer = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=dtype, use_safetensors=True)
    return Network(name, transformer.to(device).eval(), guidance, Sampling(**stored))


def plausible_condition(transformer: LlamaGenTransformer, batch: int) -> Condition:
    """A condition of the right shape; the time of a pass does not depend on what it says."""
    config, device = transformer.config, transformer.device
    if config.condition == "class":
        return Condition(class_labels=torch.arange(batch, device=device) % config.num_classes)
    mask = torch.zeros(batch, config.cls_token_num, dtype=torch.bool, device=device)
    mask[:, -min(8, config.cls_token_num) :] = True
    embeds = torch.randn(*mask.shape, config.caption_dim, device=device) * mask[..., None]
    return Condition(caption_embeds=embeds, caption_mask=mask)
