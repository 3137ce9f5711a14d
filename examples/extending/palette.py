"""A model family whose image tokenizer has no network: a token is the color of a pixel."""

import torch

from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.pipelines.families import TEXT_COMPONENTS, Component, ModelFamily, register_family
from vargen.pipelines.llamagen import LlamaGenPipeline

# isort: split
from diffusers import ConfigMixin, ModelMixin  # after vargen; diffusers looks for ModelMixin in the module of a component
from diffusers.configuration_utils import register_to_config


class Palette(ModelMixin, ConfigMixin):
    """An image tokenizer with one token per pixel."""

    downsampling = 1  # pixels per token along one side

    @register_to_config
    def __init__(self, codebook_size: int = 64):
        super().__init__()
        self.colors = torch.nn.Parameter(torch.rand(codebook_size, 3) * 2 - 1)

    def decode(self, tokens):
        """Decode tokens [B, R, C] to pixels [B, 3, R, C] in [-1, 1]."""
        return self.colors[tokens].movedim(-1, 1)

    def encode(self, pixels):
        """Encode pixels to the tokens of the nearest colors."""
        distances = torch.cdist(pixels.movedim(1, -1).flatten(1, 2), self.colors)
        return distances.argmin(-1).unflatten(1, pixels.shape[2:])


class PalettePipeline(LlamaGenPipeline):
    """Class or text to pixel art."""

    @property
    def codebook(self):
        return self.vqvae.colors


register_family(
    ModelFamily(
        name="palette",
        pipeline=PalettePipeline,
        components={
            "transformer": Component((LlamaGenTransformer,), required=True, follows_dtype=True),
            "vqvae": Component((Palette,), required=True, matches={"codebook_size": "vocab_size"}),
            **TEXT_COMPONENTS,
        },
    )
)
