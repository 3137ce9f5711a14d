"""Pixels and latents that are not finite are an error that says where, and no image."""

import math

import pytest
import torch
from PIL import Image
from tiny_models import class_pipeline

from vargen import LlamaGenPipeline
from vargen.models.tokenizers.vq import NonFinitePixelsError


@pytest.fixture
def spoilt() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_not_finite_are_an_error_and_no_image(spoilt, value):
    with torch.no_grad():
        spoilt.vqvae.decoder.conv_out.bias[1] = value
    for kind in ("pil", "np", "pt"):
        with pytest.raises(NonFinitePixelsError, match="first in image 1 of 2 at row 0, column 0 of 8 x 8"):
            spoilt(class_labels=[3, 4], output_type=kind)
    assert spoilt(class_labels=3, output_type="latent").images.shape == (1, 4, 4), "tokens are sound"


def test_the_first_bad_pixel_is_said_to_be_where_it_is(spoilt):
    tokens = torch.zeros(3, 4, 4, dtype=torch.int64)
    # The attention of the real decoder would spread it over the image.
    spoilt.vqvae.decode = lambda indices: torch.where(indices == 7, math.nan, 0.0)[:, None].expand(-1, 3, 4, 4)
    assert len(spoilt.decode_tokens(tokens)) == 3
    tokens[1, 2, 3] = 7
    with pytest.raises(NonFinitePixelsError, match="image 2 of 3 at row 2, column 3 of 4 x 4"):
        spoilt.decode_tokens(tokens)


@pytest.mark.parametrize("part", ["encoder.conv_in.weight", "quant_conv.bias", "quantize.embedding.weight"])
def test_images_are_not_encoded_by_weights_that_hold_nan(spoilt, part):
    image = Image.new("RGB", (8, 8), "red")
    assert spoilt.encode_image(image).shape == (1, 4, 4)
    with torch.no_grad():
        spoilt.vqvae.get_parameter(part).view(-1)[0] = math.nan
    with pytest.raises(NonFinitePixelsError, match="first in image 1 of 1 at token row 0, column 0 of 4 x 4"):
        spoilt.encode_image(image)
