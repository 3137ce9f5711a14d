"""What tests of several models check in the same way."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor

from vargen.decoding import PRESETS, decode
from vargen.verify.whole_sequence import compute_pass_logits, compute_whole_logits


def run_or_refuse(
    model: Any, condition: Any, name: str, missing: Container[str], reasons: str = r"resolution|draft|trained|codebook"
) -> Tensor | None:
    """Tokens `[B, N]` by a method, which are those of `ar` if it promises that; None if it says that a part is missing."""
    images = torch.arange(len(condition))
    if name in missing:
        with pytest.raises(ValueError, match=reasons):
            decode(model, condition, images, PRESETS[name])
        return None
    found = decode(model, condition, images, PRESETS[name]).tokens
    if PRESETS[name].sequential_tokens:
        assert torch.equal(found, decode(model, condition, images, "ar").tokens)
    return found


def check_passes(model: Any, condition: Any) -> None:
    """Logits of passes are those of one over prompt and image, as `vargen check` compares them."""
    tokens = decode(model, condition, torch.arange(len(condition)), "ar").tokens
    whole, passes = (compute(model, condition, tokens) for compute in (compute_whole_logits, compute_pass_logits))
    torch.testing.assert_close(passes, whole, atol=1e-3, rtol=1e-4)
