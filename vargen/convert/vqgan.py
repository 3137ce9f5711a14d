"""Official files of VQGAN image tokenizers, such as Chameleon's `vqgan.ckpt`, of which the decoder is read."""

from __future__ import annotations

from pathlib import Path

from vargen.convert.state_dicts import build_network, describe_network, read_checkpoint
from vargen.models.tokenizers.vqgan import DECODER_PARTS, VQGANDecoder, find_sizes
from vargen.values import one_line
from vargen.weight_files import list_shapes


class OfficialVQGAN:
    """A VQGAN tokenizer in a file with any of the formats of `read_checkpoint`, with the interface of `StoredVQGAN`."""

    def __init__(self, file: Path):
        self._file = file
        self._state = {name: value for name, value in read_checkpoint(file).items() if name.startswith(DECODER_PARTS)}
        try:
            self._sizes = find_sizes(list_shapes(self._state))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{file} does not hold a VQGAN image tokenizer: {one_line(error)}") from error
        self.network: VQGANDecoder = describe_network(VQGANDecoder, self._sizes, self._state, file)

    def load(self) -> VQGANDecoder:
        """Build its decoder, in evaluation mode."""
        network: VQGANDecoder = build_network(VQGANDecoder, self._sizes, self._state, self._file)
        return network.eval()
