"""Target models with random weights and drafters of every kind, whose passes take the paths of a GPU on a CPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_transformer, tiny_vq

from vargen.decoding.jacobi import Jacobi
from vargen.kernels import dispatch
from vargen.models.guidance import Guidance
from vargen.models.heads.decoding import EagleModel, LowResolutionDrafter, MedusaHeads
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.decoding import LlamaGenTokenModel

GRID = 6  # so that windows of 16 reach beyond rows and, at the end, beyond the grid


def tiny_target(
    device: str = "cpu", low_res: LowResolutionDrafter | None = None, guidance: Guidance | float = 2.0
) -> LlamaGenTokenModel:
    sizes = {"grid_size": GRID, "n_head": 2, "multiple_of": 32}
    codes = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).to(device)
    draft = LlamaGenTokenModel(tiny_transformer("class", n_layer=1, grid_size=GRID).to(device))
    torch.manual_seed(2)
    eagle = EagleDrafter(dim=32, vocab_size=64, above=True, **sizes).eval().to(device)
    medusa = MedusaDrafter(32, 64, 4).eval().to(device)
    transformer = tiny_transformer("class", n_layer=3, grid_size=GRID).to(device)
    heads = {"eagle": partial(EagleModel, eagle), "medusa": partial(MedusaHeads, medusa)}
    return LlamaGenTokenModel(transformer, guidance, codebook=codes, draft_model=draft, draft_heads=heads, low_res=low_res)


def tiny_low_res(upsampled: bool) -> LowResolutionDrafter:
    """Draws a grid of half the side, which an up-sampler makes probabilities of; or the tokenizer, tokens."""
    small = LlamaGenTokenModel(tiny_transformer("class", n_layer=1, grid_size=GRID // 2), 2.0)
    torch.manual_seed(3)
    upsampler = TokenUpsampler(64, GRID // 2, GRID, 16, blocks=1).eval() if upsampled else None
    return LowResolutionDrafter(small, (GRID, GRID), upsampler, tiny_vq())


def take_gpu_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes on a CPU take the paths of a GPU: no NumPy, no shapes that values decide, no windows chosen in each pass."""
    choose, gpu = Jacobi.choose_widths, SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(Jacobi, "choose_widths", lambda self, model, condition, slots: choose(self, gpu, condition, slots))
    monkeypatch.setattr(dispatch, "EAGER_CPU", False)
