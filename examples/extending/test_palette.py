from tempfile import TemporaryDirectory

import pytest
import torch
from palette import Palette, PalettePipeline

from vargen import open_pipeline
from vargen.models.llamagen.network import LlamaGenTransformer


def test_a_palette_model_generates_is_saved_and_opens_again():
    sizes = {"dim": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "grid_size": 4, "num_classes": 10, "multiple_of": 32}
    transformer = LlamaGenTransformer(condition="class", **sizes)
    pipe = PalettePipeline(vqvae=Palette(64), transformer=transformer)
    assert pipe(class_labels=3).images[0].size == (4, 4)
    with TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        again = open_pipeline(folder)
    assert type(again) is PalettePipeline
    assert torch.equal(again.vqvae.colors, pipe.vqvae.colors)
    with pytest.raises(ValueError, match="codebook_size"):
        PalettePipeline(vqvae=Palette(32), transformer=transformer)
