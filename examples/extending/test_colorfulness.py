import torch
from colorfulness import Colorfulness
from PIL import Image


def test_a_red_square_is_more_colorful_than_a_gray_one():
    squares = [Image.new("RGB", (8, 8), color) for color in ("gray", "firebrick", "red")]
    gray, dull, red = Colorfulness().score(squares, ["a square"] * 3)
    assert gray == 0 and gray < dull < red
    pixels = torch.zeros(1, 3, 8, 8)
    pixels[:, 0] = 1
    assert torch.allclose(Colorfulness().score(pixels, ["a square"])[0], red)
