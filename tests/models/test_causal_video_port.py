"""The causal video transformer against tensors of an independent port, block by block through a cache; the official sizes.

The port follows the descriptions of Wan2.1 (arXiv 2503.20314) and of causal generation with a cache (arXiv 2506.08009) in
float64; commit `a0068ee6` has it, in `tests/support/wan_port.py`.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vargen.convert.wan import to_original_names
from vargen.models.causal_video.network import CausalVideoTransformer

from diffusers import WanTransformer3DModel  # isort: skip  (after the torchvision guard)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "causal_video.safetensors"
SIZES = {
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}
# What the port ran: latents, and for each case the window, the sinks, and the frames by block.
SHAPE = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 16, "text_dim": 8, "freq_dim": 16}
HEIGHT, WIDTH = 2, 4
TIMESTEPS = (1000.0, 937.5, 2500 / 3, 625.0, 0.0)  # of the distilled models, then the clean pass that fills the cache
CASES = {"all": (None, 0, (3, 3, 3)), "window": (7, 2, (3, 3, 3, 3))}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_stored_tensors(case):
    golden, (window, sinks, blocks) = load_file(GOLDEN), CASES[case]
    state = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    model = CausalVideoTransformer(height=HEIGHT, width=WIDTH, **SHAPE)
    model.load_state_dict(state)
    cache = model.eval().new_cache(1, sum(blocks), window=window, sinks=sinks)
    text, found = model.text_cache(golden["text"][None]), []
    for number, frames in enumerate(blocks):
        cache.begin_block(frames)
        for t in TIMESTEPS:
            clean, noise = golden["clean"][number], golden["noise"][number]
            noisy = clean + (t / 1000) * (noise - clean)
            found.append(model(noisy[None], torch.tensor([t]), text, cache)[0])
        cache.commit()
    expected = golden[f"velocity.{case}"]
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_official_names_are_those_that_diffusers_converts(size):
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    shape = SIZES[size]
    heads = shape["num_heads"]
    with torch.device("meta"):
        ours = CausalVideoTransformer(**shape).state_dict()
        theirs = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=shape["dim"] // heads, ffn_dim=shape["ffn_dim"],
            num_layers=shape["num_layers"],
        ).state_dict()  # fmt: skip
    converted = convert_wan_transformer_to_diffusers(dict(ours))
    assert {name: value.shape for name, value in converted.items()} == {name: value.shape for name, value in theirs.items()}
    assert to_original_names(theirs, Path("theirs")).keys() == ours.keys()
