"""The decoder of a VQGAN image tokenizer: of Chameleon and Liquid, and of Emu3.5, whose IBQ has a large codebook.

Sources: Esser et al. 2021, "Taming Transformers" (arXiv 2012.09841); Shi et al. 2024, "Scalable Image Tokenization with Index
Backpropagation Quantization" (arXiv 2412.02692), which trains the codebook in another way. Codes are not normalized. Parameter
names are the official ones. All sizes follow from the weights, so that no configuration is read. The encoder is left out.

Shape suffixes: B batch, Y/X pixel rows and columns, R/G grid rows and columns, V codes, E code dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.accelerate_utils import apply_forward_hook
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vargen.folders.networks import SkipInit
from vargen.models.tokenizers.blocks import VQDecoder, VQParameterNames
from vargen.values import one_line
from vargen.weight_files import find_weight_files, list_shapes, read_headers, validate_weights

_NAMING = VQParameterNames("down", "up", "block", ("block_1", "attn_1", "block_2"), finest_first=True)
DECODER_PARTS = ("quantize.", "post_quant_conv.", "decoder.")
_MOST = 32  # levels, and blocks of one


class VQGANDecoder(ModelMixin):
    """Codebook and decoder.

    Args:
        codes, width: number of codes V, and their dimension E.
        z_channels: width of the features after the quantizer.
        widths: of the levels, finest first; k+1 of them upsample by 2^k.
        blocks: residual blocks of a level, but one.
        attention: levels with attention, by number, the coarsest first.
    """

    def __init__(
        self, codes: int, width: int, z_channels: int, widths: Sequence[int], blocks: int, attention: Sequence[int] = (0,)
    ):
        super().__init__()
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(codes, width)})
        self.post_quant_conv = nn.Conv2d(width, z_channels, 1)
        self.decoder = VQDecoder(3, widths, blocks, z_channels, _NAMING, attention)

    @property
    def codebook(self) -> Tensor:
        """Float `[V, E]`."""
        return self.quantize["embedding"].weight.detach()

    @apply_forward_hook  # lets CPU offload load the weights
    def decode(self, tokens: Tensor) -> Tensor:
        """Decode tokens `[B, R, G]` to pixels `[B, 3, Y, X]`, about [-1, 1]."""
        codes = self.quantize["embedding"](tokens.to(self.codebook.device))
        return self.decoder(self.post_quant_conv(codes.movedim(-1, 1)))

    def save(self, folder: Path) -> None:
        """Write a folder that `StoredVQGAN` reads."""
        folder.mkdir(exist_ok=True)
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})


class StoredVQGAN:
    """A VQGAN tokenizer in a folder, by the headers of `model.safetensors` or its shards; no weights were read.

    Attributes:
        network: its decoder, without memory, in evaluation mode.

    Raises:
        ValueError: for a folder without it, with the file and what is wrong.
    """

    def __init__(self, folder: Path):
        header, places = read_headers(find_weight_files(folder, "model"))
        header = {name: info for name, info in header.items() if name.startswith(DECODER_PARTS)}
        self._files = {name: places[name] for name in header}
        try:
            with torch.device("meta"), SkipInit():
                self.network = VQGANDecoder(**find_sizes(list_shapes(header))).eval()
        except (KeyError, ValueError, RuntimeError) as error:
            raise ValueError(f"{folder} does not hold a VQGAN image tokenizer: {one_line(error)}") from error
        validate_weights(header, list_shapes(self.network.state_dict()), str(folder))

    def load(self) -> VQGANDecoder:
        """Read the weights, in the dtype in which they are stored."""
        state: dict[str, Tensor] = {}
        for file in sorted(set(self._files.values())):
            with safe_open(str(file), "pt") as opened:
                state |= {name: opened.get_tensor(name) for name, place in self._files.items() if place == file}
        self.network.load_state_dict(state, assign=True)
        return self.network


def find_sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the arguments of `VQGANDecoder` for the shapes of its tensors. KeyError for one that is missing, ValueError."""

    def size(name: str, dims: int) -> Sequence[int]:
        if len(shape := shapes[name]) != dims:
            raise ValueError(f"its {name} is {list(shape)}")
        return shape

    def count(prefix: str) -> int:
        found = len({name.removeprefix(prefix).partition(".")[0] for name in shapes if name.startswith(prefix)})
        if not 1 <= found <= _MOST:
            raise ValueError(f"it has {found} parts {prefix}0 and on, and 1 to {_MOST} are allowed")
        return found

    levels, (codes, width) = count("decoder.up."), size("quantize.embedding.weight", 2)
    return {
        "codes": codes,
        "width": width,
        "z_channels": size("post_quant_conv.weight", 4)[0],
        "widths": [size(f"decoder.up.{level}.block.0.conv1.weight", 4)[0] for level in range(levels)],
        "blocks": count("decoder.up.0.block.") - 1,
        "attention": [levels - 1 - level for level in range(levels) if f"decoder.up.{level}.attn.0.norm.weight" in shapes],
    }
