"""Similarity of images to references: PSNR and SSIM.

Shape suffixes: N images, C channels, Y/X pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PSNR = 100.0  # dB; for identical images, whose PSNR is infinite. Images that differ by one 8-bit level have at least 48
_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03  # Wang et al. 2004


def psnr(images_NCYX: Tensor, references_NCYX: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, float32 `[N]`, of images in [0, 1]; `MAX_PSNR` for identical images."""
    error = (images_NCYX.double() - references_NCYX.double()).square().mean((1, 2, 3))
    return (-10 * error.clamp_min(10 ** (-MAX_PSNR / 10)).log10()).float()


def ssim(images_NCYX: Tensor, references_NCYX: Tensor) -> Tensor:
    """Return the structural similarity, float32 `[N]`, of images in [0, 1] (Wang et al. 2004, equation 13); 1 if identical.

    Uses Gaussian windows of 11 pixels and deviation 1.5 that lie inside the image, whose sides thus have at least 11 pixels;
    averages over windows and channels.
    """
    x, y = images_NCYX.double(), references_NCYX.double()
    at = torch.arange(_WINDOW, dtype=torch.float64, device=x.device) - _WINDOW // 2
    kernel = (-0.5 * (at / _SIGMA) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)

    def local(values: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(values, kernel, groups=len(kernel)), kernel.transpose(2, 3), groups=len(kernel))

    mean_x, mean_y = local(x), local(y)
    variance_x, variance_y = local(x * x) - mean_x**2, local(y * y) - mean_y**2
    covariance = local(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    structure = (2 * covariance + _K2**2) / (variance_x + variance_y + _K2**2)
    return (luminance * structure).mean((1, 2, 3)).float()
