"""LoRA of a causal video transformer: low-rank updates of the matrices of its blocks.

Hu et al. 2021 (arXiv:2106.09685): a matrix W [out, in] becomes W + B A, where A [rank, in] and B [out, rank] are small. The
updates are merged into a second network, which runs as fast as the first one and shares all its other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.int8.arithmetic import quantize_weight_rows
from vargen.models.causal_video.blocks import CausalVideoBlock
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.quantization import SCALE_SUFFIX
from vargen.models.storage import QuantizedStorageMixin, validate_weight_format


class LowRankUpdate(nn.Module):
    """Update B A of a matrix `[rows, columns]`. A new one is zero, because B is."""

    def __init__(self, rows: int, columns: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.B = nn.Parameter(torch.zeros(rows, rank))


class CausalVideoLoRA(QuantizedStorageMixin, ConfigMixin):
    """Low-rank updates of all matrices in the blocks of a `CausalVideoTransformer`.

    Args:
        dim, ffn_dim, num_layers: size of the network, as there.
        rank: rank of each update.
        weight_format: storage format of `save_pretrained`; see `QuantizedStorageMixin`.
    """

    @register_to_config
    def __init__(
        self,
        dim: int = 1536,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        rank: int = 32,
        weight_format: str | None = None,
    ):
        super().__init__()
        validate_weight_format(weight_format)
        if not 1 <= rank <= dim:
            raise ValueError(f"rank must be from 1 to dim, {dim}, got {rank}")
        with torch.device("meta"):
            layers = _linear_layers(CausalVideoBlock(dim, ffn_dim, 1))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({_key(name): LowRankUpdate(*layer.weight.shape, rank) for name, layer in layers.items()})
            for _ in range(num_layers)
        )
        self.layer_names = {_key(name): name for name in layers}

    # -- generation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self, transformer: CausalVideoTransformer) -> CausalVideoTransformer:
        """Return a second network with the updates; it shares all weights without one.

        With 8-bit products, the updated matrices are quantized again.
        """
        state: dict[str, Tensor] = dict(transformer.state_dict())
        if any(value.device.type == "meta" for value in state.values()):
            raise ValueError("a LoRA cannot be merged into weights that are offloaded one by one: use enable_model_cpu_offload")
        for layer, update in self.updates():
            weight, scale = f"{layer}.weight", f"{layer}.{SCALE_SUFFIX}"
            known = state[weight].float() * state[scale][:, None] if scale in state else state[weight].float()
            new = torch.addmm(known, update.B.to(known), update.A.to(known))
            if scale in state:
                state[weight], state[scale] = quantize_weight_rows(new)
            else:
                state[weight] = new.to(state[weight].dtype)
        config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
        with torch.device("meta"):
            merged = type(transformer)(**config)
        merged.load_state_dict(state, assign=True)
        return merged.requires_grad_(False).eval()

    def updates(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each layer in the network, and its update."""
        for number, updates in enumerate(self.blocks):
            for key, name in self.layer_names.items():
                yield f"blocks.{number}.{name}", updates[key]


def _linear_layers(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}


def _key(name: str) -> str:
    """Return the name of a layer without dots, which names of modules must not have."""
    return name.replace(".", "_")
