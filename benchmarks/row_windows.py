"""Windows by image in a running batch: tokens of the passes, tokens computed, passes, and processor seconds.

    OMP_NUM_THREADS=1 python benchmarks/row_windows.py [--images 64] [--slots 8] [--repeats 2]

Settings run in turn in one process. `computed` counts the tokens of packed passes, without those of finished images and
of places past the end of the grid. Images are compared with those of the first setting.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from vargen import LlamaGenPipeline
from vargen.decoding import Accelerator, Jacobi, Sampling, shared_noise
from vargen.decoding.next_token.engine import Engine
from vargen.decoding.next_token.row_windows import RowWindow

PROMPTS = Path(__file__).parent / "eval_prompts.txt"
WINDOWS = {"window 16": 16, "RowWindow(16)": RowWindow(16), "rows": "rows"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float32)
    condition, count = pipe.encode_condition(PROMPTS.read_text("utf-8").splitlines()[: options.images])
    settings = dict(pipe.default_sampling)
    model, sampling = pipe.decoding_model(settings.pop("guidance_scale")), Sampling(**settings)
    tokens, forward_packed = [0, 0], model.forward_packed

    def counted(fed_tokens: Tensor, state: object, tree: object, fed: Tensor) -> object:
        tokens[0] += fed_tokens.numel()
        tokens[1] += int(fed.sum())
        return forward_packed(fed_tokens, state, tree, fed)

    model.forward_packed = counted
    first = None
    for _ in range(options.repeats):
        for name, window in WINDOWS.items():
            tokens[:] = [0, 0]
            engine = Engine(model, Accelerator("gumbel", Jacobi(window, "gumbel"), shared_noise), batch_size=options.slots)
            engine.submit(condition, torch.arange(count), sampling)
            start = time.process_time()
            finished = sorted(engine.run(), key=lambda image: image.number)
            seconds = time.process_time() - start
            images = [image.tokens for image in finished]
            first = first or images
            same = sum(torch.equal(a, b) for a, b in zip(first, images, strict=True))
            stats = engine.make_stats(finished)
            passes = sum(stats.passes_by_width.values())
            figures = (
                f"tokens {tokens[0]:,}, computed {tokens[1]:,}, passes {passes}, {stats.tokens_per_pass:.2f} tokens per pass"
            )
            print(f"{name}: {figures} and image, {seconds:.1f} s, {same} of {count} images as at first", flush=True)


if __name__ == "__main__":
    main()
