"""LlamaGen transformers for benchmarks: of a checkpoint, or of an official size with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from vargen.decoding import Sampling
from vargen.models.condition import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen import SIZES, LlamaGenTransformer
from vargen.pipelines.adapters.llamagen import LlamaGenTokenModel
from vargen.pipelines.decoders import TokenDecoder

RANDOM = {f"llamagen-{size.lower()}": size for size in SIZES}
_GATHERED = ("tok_embeddings.", "cls_embedding.")  # embedding tables, of which a pass reads only a few rows


@dataclass(frozen=True)
class Network:
    """A transformer to benchmark, with the sampling settings of its checkpoint."""

    name: str
    transformer: LlamaGenTransformer
    guidance_scale: float = 4.0
    sampling: Sampling = field(default_factory=Sampling)
    baseline: ClassVar[str] = "ar"

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.transformer.tokens

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the parameters that every pass reads in full."""
        return sum(p.nbytes for name, p in self.transformer.named_parameters() if not name.startswith(_GATHERED))

    def passes(self, rows: int, widths: Sequence[int]) -> dict[int, Callable[[], Any]]:
        """By width, a function that runs one pass of `width` tokens with half of an image in the cache. Caches share memory."""
        caches = filled_caches(self.transformer, rows, widths)
        vocab, device = self.transformer.config.vocab_size, self.transformer.device
        fed = {width: torch.randint(vocab, (rows, width), device=device) for width in sorted(set(widths))}
        # The cache's length does not advance, so every call repeats the same pass.
        return {width: _step(self.transformer, fed[width], caches[width]) for width in fed}

    def condition(self, batch: int) -> Condition:
        """Return an arbitrary condition of the right shape; its content does not affect the time of a pass."""
        return plausible_condition(self.transformer, batch)

    def decoder(self, compile: bool = False) -> TokenDecoder:
        """Return a decoder with the checkpoint's sampling settings; `compile` runs the passes through `torch.compile`."""
        step = torch.compile(self.transformer, dynamic=False) if compile else None
        return TokenDecoder(LlamaGenTokenModel(self.transformer, self.guidance_scale, step=step), self.sampling)


def _step(transformer: LlamaGenTransformer, fed: torch.Tensor, cache: KVCache) -> Callable[[], Any]:
    return lambda: transformer(fed, cache=cache)


def filled_caches(transformer: LlamaGenTransformer, rows: int, widths: Sequence[int]) -> dict[int, KVCache]:
    """By width, a cache for passes of `width` tokens, half full of random keys and values. The caches share memory."""
    caches = {width: transformer.new_cache(rows, scratch=width) for width in sorted(widths)}
    widest = caches[max(widths)]
    widest.k.normal_()
    widest.v.normal_()
    keys, values = widest.k.flatten(), widest.v.flatten()
    for cache in caches.values():
        cache.k, cache.v = keys[: cache.k.numel()].view_as(cache.k), values[: cache.v.numel()].view_as(cache.v)
        cache.advance(transformer.tokens // 2)
    return caches


def random_network(name: str, dtype: torch.dtype, device: torch.device) -> Network:
    """Create one of `RANDOM`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = LlamaGenTransformer(**SIZES[RANDOM[name]])
        torch.nn.init.normal_(transformer.output.weight, std=0.02)  # zero by default, for training
    return Network(name, transformer.to(device, dtype).eval())


def stored_network(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Network:
    """Load the transformer of a validated pipeline folder."""
    stored = json.loads((folder / "model_index.json").read_text()).get("defaults") or {}
    stored = {key: value for key, value in stored.items() if value is not None}
    guidance = float(stored.pop("guidance_scale", 4.0))
    transformer = LlamaGenTransformer.from_pretrained(folder / "transformer", torch_dtype=dtype, use_safetensors=True)
    return Network(name, transformer.to(device).eval(), guidance, Sampling(**stored))


def plausible_condition(transformer: LlamaGenTransformer, batch: int) -> Condition:
    """Return a condition of the right shape; see `Network.condition`."""
    config, device = transformer.config, transformer.device
    if config.condition == "class":
        return Condition(class_labels=torch.arange(batch, device=device) % config.num_classes)
    mask = torch.zeros(batch, config.cls_token_num, dtype=torch.bool, device=device)
    mask[:, -min(8, config.cls_token_num) :] = True
    embeds = torch.randn(*mask.shape, config.caption_dim, device=device) * mask[..., None]
    return Condition(caption_embeds=embeds, caption_mask=mask)
