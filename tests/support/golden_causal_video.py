"""Golden tensors of the causal video transformer, written by the float64 port and not by vargen.

    python tests/support/golden_causal_video.py

writes tests/golden/causal_video.safetensors: weights under their original names, text features, clean blocks and their noise,
and the velocities of every step of every block, first with all frames visible, then with a window and sinks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from wan_port import PortCache, port

FILE = Path(__file__).resolve().parents[1] / "golden" / "causal_video.safetensors"
SHAPE = {"dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 2, "channels": 16, "text_dim": 8, "freq_dim": 16}
HEIGHT, WIDTH, FRAMES = 2, 4, 3  # of latents, and of a block
TIMESTEPS = (1000.0, 937.5, 2500 / 3, 625.0, 0.0)  # of the distilled models, then the clean pass that fills the cache
CASES = {"all": (None, 0, (3, 3, 3)), "window": (7, 2, (3, 3, 3, 3))}  # window, sinks, and frames by block


def random_weights(generator: torch.Generator) -> dict[str, Tensor]:
    """Every tensor of the layout, random, with norms around 1."""
    dim, ffn = SHAPE["dim"], SHAPE["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (dim, SHAPE["channels"], 1, 2, 2),
        "patch_embedding.bias": (dim,),
    }

    def add(name: str, inputs: int, outputs: int) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    for name, inputs, outputs in (
        ("text_embedding.0", SHAPE["text_dim"], dim), ("text_embedding.2", dim, dim),
        ("time_embedding.0", SHAPE["freq_dim"], dim), ("time_embedding.2", dim, dim), ("time_projection.1", dim, 6 * dim),
        ("head.head", dim, 4 * SHAPE["channels"]),
    ):  # fmt: skip
        add(name, inputs, outputs)
    for layer in range(SHAPE["num_layers"]):
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                add(f"blocks.{layer}.{attention}.{part}", dim, dim)
            shapes.update({f"blocks.{layer}.{attention}.norm_{part}.weight": (dim,) for part in "qk"})
        add(f"blocks.{layer}.ffn.0", dim, ffn)
        add(f"blocks.{layer}.ffn.2", ffn, dim)
        shapes.update({f"blocks.{layer}.norm3.{part}": (dim,) for part in ("weight", "bias")})
        shapes[f"blocks.{layer}.modulation"] = (1, 6, dim)
    shapes["head.modulation"] = (1, 2, dim)
    values = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) for name, shape in shapes.items()
    }
    return {name: value + float("norm" in name and name.endswith("weight")) for name, value in values.items()}


def noisy_block(golden: dict[str, Tensor], number: int, t: float) -> Tensor:
    clean, noise = golden["clean"][number], golden["noise"][number]
    return clean + (t / 1000) * (noise - clean)


def run_port(golden: dict[str, Tensor], case: str) -> Tensor:
    """The velocities of a case, float32 `[blocks * steps * frames, C, Y, X]`."""
    window, sinks, blocks = CASES[case]
    state = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    kept, found = PortCache(window, sinks), []
    for number in range(len(blocks)):
        for t in TIMESTEPS:
            noisy = noisy_block(golden, number, t)
            found.append(port(state, SHAPE["num_heads"], noisy, t, golden["text"], kept, number * FRAMES, t == 0))
    return torch.cat(found).float()


def main() -> None:
    generator = torch.Generator().manual_seed(48)
    golden = {f"weights.{name}": value for name, value in random_weights(generator).items()}
    blocks = max(len(blocks) for _, _, blocks in CASES.values())
    golden["text"] = torch.randn(5, SHAPE["text_dim"], generator=generator)
    for name in ("clean", "noise"):
        golden[name] = torch.randn(blocks, FRAMES, SHAPE["channels"], HEIGHT, WIDTH, generator=generator)
    velocities = {f"velocity.{case}": run_port(golden, case) for case in CASES}
    save_file(golden | velocities, FILE)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes, {len(golden) + len(velocities)} tensors")


if __name__ == "__main__":
    main()
