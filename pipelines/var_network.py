"""VAR models for benchmarks: of a checkpoint, or of an official size with random weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.convert.var import DEFAULTS
from vargen.decoding import DecodeOutput, Sampling
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var import SCALES, VARTransformer, official_config
from vargen.pipelines.adapters.var import VARScaleModel
from vargen.pipelines.decoders import ScaleDecoder, scale_pass, scales_of
from vargen.pipelines.published_var import PublishedLoop

RANDOM = {f"var-d{depth}": depth for depth in (16, 20, 24, 30, 36)}
_LARGE = 36  # depth of the official 512-pixel model; the others generate 256 pixels
_ONCE = ("ada_lin", "class_emb", "caption_", "null_cond", "pos_", "lvl_embed")  # read once per image, or a few rows per pass


@dataclass(frozen=True)
class Network:
    """A transformer and its image tokenizer to benchmark, with the sampling settings of the checkpoint."""

    name: str
    transformer: VARTransformer
    vqvae: MultiScaleVQModel
    guidance_scale: float = DEFAULTS["guidance_scale"]
    sampling: Sampling = field(default_factory=Sampling)
    baseline: ClassVar[str] = "plain"

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.transformer.tokens

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the parameters that every pass reads in full."""
        named = self.transformer.named_parameters()
        return sum(p.nbytes for name, p in named if not any(part in name for part in _ONCE))

    def passes(self, rows: int, widths: Sequence[int]) -> dict[int, Callable[[], Any]]:
        """By width, a function that runs the pass of `width` tokens at its scales of an image.

        Raises:
            ValueError: for a width that is not the size of a scale or of consecutive scales.
        """
        model, found = self._scales(1.0), {}
        for width in sorted(set(widths)):
            first, last = scales_of(model.scale_tokens, width)
            found[width] = scale_pass(model, self.condition(rows), rows, first, last, 1.0)
        return found

    def condition(self, batch: int) -> Condition:
        """Return an arbitrary condition of the right shape (captions of eight tokens); content does not affect the time."""
        config, device = self.transformer.config, self.transformer.device
        if config.condition == "class":
            return Condition(class_labels=torch.arange(batch, device=device) % config.num_classes)
        mask = torch.zeros(batch, config.caption_rows, dtype=torch.bool, device=device)
        mask[:, -min(8, config.caption_rows) :] = True
        embeds = torch.randn(*mask.shape, config.caption_dim, device=device) * mask[..., None]
        return Condition(caption_embeds=embeds, caption_mask=mask)

    def decoder(self, compile: bool = False) -> ScaleDecoder:
        """Return a decoder with the checkpoint's sampling settings; `compile` runs the passes through `torch.compile`."""
        step = torch.compile(self.transformer, dynamic=False) if compile else None
        return ScaleDecoder(self._scales(self.guidance_scale, step), self.sampling)

    def _scales(self, guidance_scale: float, step: Any = None) -> VARScaleModel:
        device = self.transformer.device
        return VARScaleModel(self.transformer, self.vqvae.quantize, guidance_scale, step=step, device=device)

    # -- whole images -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pixels(self, drawn: DecodeOutput) -> Tensor:
        """Decode the output of a decoder to pixels `[B, 3, Y, X]`."""
        assert drawn.canvas is not None
        return self.vqvae.decode_latent(drawn.canvas)

    def published(self, batch: int) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
        """Return a function that runs the published float32 loop on a batch, and one that decodes its result to pixels."""
        loop = PublishedLoop(*(copy.deepcopy(part).float() for part in (self.transformer, self.vqvae)))
        model, condition = self._scales(self.guidance_scale), self.condition(batch)
        condition = model.start(condition).conditions[0]  # without padding rows, which would slow it down
        generator = torch.Generator(self.transformer.device).manual_seed(0)
        settings = (self.guidance_scale, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)

        @torch.no_grad()
        def pixels(canvas: Tensor) -> Tensor:
            return loop.vqvae.decode_latent(canvas)

        return lambda: loop(condition, generator, *settings)[1], pixels

    def work(self, batch: int) -> list[tuple[int, int]]:
        """Return the bytes of weights read and the floating-point operations of each pass of the baseline."""
        config, scales = self.transformer.config, self.transformer.scales
        D, V = self.transformer.lvl_embed.embedding_dim, config.vocab_size
        rows = batch * (1 if self.guidance_scale == 1 else 2)
        caption = min(8, config.caption_rows) if config.condition == "text" else 0
        matrices = {name: p.numel() for name, p in self.transformer.named_parameters() if p.dim() == 2}
        once = sum(count for name, count in matrices.items() if "ada_lin" in name)
        linear = sum(count for name, count in matrices.items() if name.startswith("blocks.") and "ada_lin" not in name)
        found = []
        for k, side in enumerate(scales):
            fed, seen = side * side + caption * (k == 0), self.transformer.ends[k] + caption
            per_row = 2 * linear * fed + 4 * config.depth * fed * seen * D + 2 * once * (k == 0)
            found.append((self.weight_bytes, rows * per_row + batch * 2 * D * V * side * side))
        return found

    def pixel_work(self, batch: int) -> int:
        """Floating-point operations of decoding the pixels."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            self.vqvae.decode_latent(self.vqvae.empty_latent(1))
        return batch * counter.get_total_flops()


def random_network(name: str, dtype: torch.dtype, device: torch.device) -> Network:
    """Create one of `RANDOM`."""
    depth = RANDOM[name]
    pixels = 512 if depth == _LARGE else 256
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = VARTransformer(**official_config(depth, pixels))
        vqvae = MultiScaleVQModel(scales=SCALES[pixels])
        torch.nn.init.normal_(transformer.head.weight, std=0.02)  # zero by default, for training
    transformer = transformer.to(device, dtype).eval()
    return Network(name, transformer, vqvae.to(device).eval(), sampling=_sampling(DEFAULTS))


def stored_network(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Network:
    """Load the transformer and the tokenizer of a validated pipeline folder."""
    stored = json.loads((folder / "model_index.json").read_text()).get("defaults") or {}
    stored = {key: value for key, value in stored.items() if value is not None}
    transformer = VARTransformer.from_pretrained(folder / "transformer", torch_dtype=dtype, use_safetensors=True)
    vqvae = MultiScaleVQModel.from_pretrained(folder / "vqvae", use_safetensors=True)
    guidance = float(stored.get("guidance_scale", DEFAULTS["guidance_scale"]))
    return Network(name, transformer.to(device).eval(), vqvae.to(device).eval(), guidance, _sampling(stored))


def _sampling(settings: dict[str, Any]) -> Sampling:
    return Sampling(**{name: value for name, value in settings.items() if name != "guidance_scale"})
