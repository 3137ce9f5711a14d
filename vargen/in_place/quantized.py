"""8-bit copies of the layers and of the image head of an enabled model, made again when its weights change."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vargen.models.transformers.base import ImageLanguageModel
from vargen.models.transformers.int8 import MOST_POSITIONS, Int8Network, quantize_layers
from vargen.models.transformers.int8_decoding import Int8Parts


class QuantizedCopy:
    """What calls of one model compute in 8 bits; kept for the next call that samples the same ids."""

    def __init__(self) -> None:
        self._network: tuple[Any, Int8Network] | None = None
        self._parts: tuple[Any, Int8Parts] | None = None

    def parts(self, described: ImageLanguageModel) -> Int8Parts:
        """Return the parts for a call; ValueError for layers that cannot be quantized.

        Weights that change in inference mode, where torch does not count changes, are not noticed.
        """
        described.most_positions = MOST_POSITIONS
        weights = tuple(map(_identify, described.model.parameters()))
        if self._network is None or self._network[0] != weights:
            self._network, self._parts = None, None  # frees their memory first
            self._network = weights, quantize_layers(described)
        ids = None if described.ids is None else tuple(described.ids.tolist())
        if self._parts is None or self._parts[0] != (described.vocab, ids):
            self._parts = (described.vocab, ids), Int8Parts(described, self._network[1])
        return self._parts[1]


def _identify(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
