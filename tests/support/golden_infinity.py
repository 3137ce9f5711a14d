"""The tiny Infinity models that the official code ran, and what it gave."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vargen.convert.infinity import detect_tokenizer, detect_transformer, rename_tokenizer, rename_transformer
from vargen.models.guidance import Condition
from vargen.models.infinity.decoding import BitGuidance, InfinityScaleModel
from vargen.models.infinity.network import InfinityTransformer
from vargen.models.infinity.schedules import ScalePlan
from vargen.models.tokenizers.bsq import BitQuantizer, BSQModel

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SETS = sorted(folder.name for folder in GOLDEN.glob("infinity_*/"))  # a is like 2B; b like 8B, with patchify


@dataclass(frozen=True)
class Official:
    """One set: networks, what went in and what came out."""

    config: dict[str, Any]
    transformer: InfinityTransformer
    vqvae: BSQModel
    io: dict[str, Tensor]

    @property
    def plan(self) -> ScalePlan:
        scales = tuple((rows, columns) for rows, columns in self.config["scales"])
        rows, columns = self.config["rope_final_hw"]
        return ScalePlan(scales, (rows, columns))

    @property
    def quantizer(self) -> BitQuantizer:
        return self.vqvae.quantizer(self.plan.scales)

    def condition(self, case: str = "cfg3") -> Condition:
        """Padded texts of a case, with its negative prompts."""
        texts = self._pad("text_features", self.config["text_lens"])
        if not case.endswith("negative"):
            return texts
        negative = self._pad("negative_features", self.config["negative_lens"])
        return Condition(None, texts.caption_embeds, texts.caption_mask, negative)

    def _pad(self, name: str, lengths: list[int]) -> Condition:
        """Texts one after the other, `[N, E]`, as rows padded on the left."""
        most = self.config["text_maxlen"]
        features = self.io[name].float()
        embeds, mask = torch.zeros(len(lengths), most, features.shape[1]), torch.zeros(len(lengths), most, dtype=torch.bool)
        for row, part in enumerate(features.split(lengths)):
            embeds[row, most - len(part) :], mask[row, most - len(part) :] = part, True
        return Condition(None, embeds, mask)

    def settings(self, case: str) -> tuple[list[float], list[int] | None, int, float]:
        """Guidance by scale, layers where it acts, number of given scales, and temperature of a case."""
        layers, leak, tau = (re.search(pattern, case) for pattern in (r"layer([-\d_]+)", r"leak(\d+)", r"tau([\d.]+)"))
        return (
            [float(each) for each in self.config["cases"][case]],
            [int(each) for each in layers[1].split("_")] if layers else None,
            int(leak[1]) if leak else 0,
            float(tau[1]) if tau else 1.0,
        )

    def model(self, case: str = "cfg3", **options: Any) -> InfinityScaleModel:
        scales, layers, _, _ = self.settings(case)
        guidance = BitGuidance.make(scales, 1.0, layers, len(scales), self.config["depth"])
        return InfinityScaleModel(self.transformer, self.quantizer, self.plan, guidance, **options)

    def by_scale(self, name: str) -> list[Tensor | None]:
        """Tensors `{name}_scale{k}`; None for those that are not recorded."""
        return [self.io.get(f"{name}_scale{k}") for k in range(len(self.plan.scales))]


def list_cases() -> list[tuple[str, str]]:
    """Each set with each of its cases."""
    return [(name, case) for name in SETS for case in json.loads((GOLDEN / name / "config.json").read_text())["cases"]]


@cache
def official(name: str) -> Official:
    folder = GOLDEN / name
    states = [{k: v for k, v in load_file(folder / f"{part}.safetensors").items()} for part in ("infinity", "vae")]
    network, codes = rename_transformer(states[0]), rename_tokenizer(states[1])
    config = json.loads((folder / "config.json").read_text())
    transformer = InfinityTransformer(**detect_transformer(network, folder)).eval()
    transformer.load_state_dict({k: v.float() for k, v in network.items()})
    vqvae = BSQModel(**detect_tokenizer(codes, folder), patchify=bool(config["apply_spatial_patchify"])).eval()
    vqvae.load_state_dict({k: v.float() for k, v in codes.items()})
    return Official(config, transformer, vqvae, load_file(folder / "io.safetensors"))
