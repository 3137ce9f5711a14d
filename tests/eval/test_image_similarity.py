"""PSNR and SSIM against closed forms, and SSIM against its definition computed pixel by pixel; contact sheets."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image

from vargen.eval.contact_sheets import contact_sheet
from vargen.eval.measurement import MAX_PSNR, psnr, ssim


def test_psnr_of_a_known_error() -> None:
    image = torch.rand(3, 3, 16, 16) * 0.5
    noise = torch.tensor([0.1, 0.01, 0.0]).view(3, 1, 1, 1)
    assert psnr(image + noise, image).tolist() == pytest.approx([20.0, 40.0, MAX_PSNR], abs=1e-3)
    one_level = torch.zeros(1, 3, 256, 256)
    one_level[0, 0, 0, 0] = 1 / 255  # the smallest difference of two 8-bit images of this size is detected
    assert float(psnr(one_level, torch.zeros_like(one_level))) < MAX_PSNR + 2


def test_ssim_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 3, 14, 13, generator=generator)
    y = (x + 0.2 * torch.rand(1, 3, 14, 13, generator=generator)).clamp(0, 1)
    weights = torch.tensor([[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)] for i in range(11)])
    weights = (weights / weights.sum()).double()
    values = []
    for c in range(3):
        for top in range(4):
            for left in range(3):
                a, b = (z[0, c, top : top + 11, left : left + 11].double() for z in (x, y))
                ma, mb = (weights * a).sum(), (weights * b).sum()
                va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
                cov = (weights * (a - ma) * (b - mb)).sum()
                c1, c2 = 0.01**2, 0.03**2
                values.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    assert float(ssim(x, y)) == pytest.approx(float(torch.stack(values).mean()), abs=1e-5)
    assert float(ssim(x, x)) == pytest.approx(1.0)
    assert float(ssim(x, 1 - x)) < 0


def test_every_image_is_on_the_sheet():
    colours = ["red", "lime", "blue", "yellow", "cyan"]
    sheet = contact_sheet([Image.new("RGB", (20, 20), c) for c in colours], ["x" * 90, "", "c", "d", "e"], columns=3, cell=40)
    assert sheet.width == 3 * 46 + 6 and sheet.height == 2 * 62 + 6
    found = {sheet.getpixel((6 + 46 * (i % 3) + 20, 6 + 62 * (i // 3) + 20)) for i in range(5)}
    assert found == {Image.new("RGB", (1, 1), c).getpixel((0, 0)) for c in colours}
    assert all(sheet.getpixel((x, 50)) == (255, 255, 255) for x in range(46, 52)), "captions stay in their cells"
