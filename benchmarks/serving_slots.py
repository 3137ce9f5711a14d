"""Images per second by the number of slots: passes of LlamaGen-B with random weights, and a projection to a GPU.

    OMP_NUM_THREADS=1 python benchmarks/serving_slots.py [--widths 1,16] [--repeats 3]

A pass reads each weight once for all slots. Its seconds are measured with full slots and half of the grid in the cache, and do
not depend on the values of weights. The projection is the roofline of `benchmarks/methods.py`. Tokens per pass are assumed to
be those of the packaged model with `gumbel`; they depend on the weights.
"""

import argparse
import time

import torch
from methods import GPU, MODELS

from vargen.adapters.llamagen import LlamaGenTokenModel
from vargen.decoding import Tree
from vargen.models.condition import Condition
from vargen.models.llamagen import SIZES, LlamaGenTransformer

SLOTS = (1, 2, 4, 8)
TOKENS = {1: 1.0, 16: 4.7}  # committed per pass and image, by the tokens fed: `ar`, and `gumbel` of the packaged model


def time_passes(model: LlamaGenTokenModel, images: int, widths: list[int], repeats: int) -> dict[int, float]:
    """Return the least processor seconds of a pass over half-filled caches, by the number of tokens fed to each image."""
    found = {}
    with torch.inference_mode():
        state, _ = model.prefill(Condition(class_labels=torch.arange(images)), max(widths))
        half = model.grid[0] * model.grid[1] // 2
        model.rollback(state, torch.full((images,), half))
        for width in widths:
            tokens, tree = torch.zeros(images, width, dtype=torch.int64), Tree.make_chain(width - 1)
            model.forward(tokens, state, tree)
            seconds = []
            for _ in range(repeats):
                start = time.thread_time()
                model.forward(tokens, state, tree)
                seconds.append(time.thread_time() - start)
            found[width] = min(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="1,16", help=f"tokens fed to an image, of {', '.join(map(str, TOKENS))}")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths = [int(width) for width in options.widths.split(",")]
    transformer = LlamaGenTransformer(**SIZES["B"], grid_size=16, condition="class").eval()
    model = LlamaGenTokenModel(transformer, 4.0)
    grid = model.grid[0] * model.grid[1]
    print("| slots | tokens fed | ms a pass | images a second | to one slot |\n|---|---|---|---|---|")
    first: dict[int, float] = {}
    for slots in SLOTS:
        for width, seconds in time_passes(model, slots, widths, options.repeats).items():
            rate = slots * TOKENS[width] / seconds / grid
            first.setdefault(width, rate)
            print(f"| {slots} | {width} | {1e3 * seconds:.1f} | {rate:.3f} | {rate / first[width]:.2f} |", flush=True)
    gpu = GPU()
    print(f"\nProjected on a {gpu.name}, images a second to one slot, overlapped:\n")
    print(f"| slots | tokens fed | {' | '.join(shape.name for shape in MODELS)} |\n|---|---|---|---|---|")
    for slots in (*SLOTS, 16, 32, 64):
        for width in widths:
            cells = [f"{slots * shape.seconds(gpu, width) / shape.seconds(gpu, width, images=slots):.1f}" for shape in MODELS]
            print(f"| {slots} | {width} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
