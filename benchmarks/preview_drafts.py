"""What drafts from a preview bring, for a model whose preview predicts the image as well as one chooses.

    python benchmarks/preview_drafts.py [--images 8] [--vocab 1024] [--json figures.json]

GLM-Image generates a preview of 16 x 16 tokens before its image of 32 x 32, in the same vocabulary; `mulo-exact` drafts the
image from it. How often a token of the image is that of the preview at its place is a property of real weights. Here it is an
argument: with probability `share` a token is that of the preview, and otherwise it is sampled from a distribution that depends
on the token before and the token above. Only passes over the image count; the preview is drafted as by `scd`.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Output, TokenModel, Tree, decode
from vargen.decoding.harness import Progress
from vargen.models.language_models.glm_image import PreviewDrafter

PREVIEW, SIZE = (16, 16), (32, 32)
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass
class State:
    """Tokens so far `[B, N + width]`, and their number `[B]`."""

    tokens: Tensor
    length: Tensor


class PreviewModel(TokenModel):
    """A preview and an image whose tokens are those of the preview with probability `share`. Chains only."""

    def __init__(self, vocab: int, share: float, spread: float, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.low_res = PreviewDrafter(vocab, PREVIEW, SIZE)
        self.vocab, self.grid, self.share, self.device = vocab, self.low_res.grid, share, torch.device("cpu")
        self._before, self._above = (torch.randn(vocab, vocab, generator=generator) * spread for _ in range(2))

    def prefill(self, condition: Any, max_width: int) -> tuple[State, Output]:
        tokens = torch.zeros(len(condition), self.grid[1] + max_width, dtype=torch.int64)
        length = torch.zeros(len(condition), dtype=torch.int64)
        return State(tokens, length), Output(self._before[torch.zeros(len(condition), 1, dtype=torch.int64)])

    def forward(self, tokens: Tensor, state: State, tree: Tree) -> Output:
        at = state.length[:, None] + torch.arange(tokens.shape[1])
        state.tokens.scatter_(1, at, tokens)
        position = at + 1
        first = PREVIEW[0] * PREVIEW[1]
        columns = torch.where(position < first, PREVIEW[1], SIZE[1])
        above = state.tokens.gather(1, (position - columns).clamp(min=0))
        probs = (self._before[tokens] + self._above[above]).softmax(-1) * (1 - self.share)
        source = self.low_res.source(position.clamp(max=self.grid[1] - 1))
        shown = state.tokens.gather(1, source.clamp(min=0))
        probs.scatter_add_(2, shown[..., None], torch.full_like(shown, self.share, dtype=torch.float32)[..., None])
        plain = (self._before[tokens] + self._above[above]).softmax(-1)
        return Output(torch.where((source >= 0)[..., None], probs, plain).clamp(min=1e-30).log())

    def commit(self, state: State, path: Tensor, count: Tensor, tree: Tree) -> None:
        state.length += count


def image_passes(model: TokenModel, method: str, seed: int) -> tuple[int, int]:
    """Tokens of the image, and the passes that committed any of them."""
    counted = [0, 0]
    first = PREVIEW[0] * PREVIEW[1]

    def after_pass(progress: Progress) -> None:
        committed, length = int(progress.num_committed), int(progress.length)
        of_image = min(committed, length - first)
        if of_image > 0:
            counted[0] += of_image
            counted[1] += 1

    decode(model, torch.zeros(1), torch.tensor([seed]), method, callback=after_pass)
    return counted[0], counted[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--spread", type=float, default=1.0, help="how much a token depends on each of its neighbors")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for share in SHARES:
        model = PreviewModel(options.vocab, share, options.spread)
        row: dict[str, float] = {"share": share}
        for method in ("scd", "scd:window=32", "mulo-exact"):
            counted = [image_passes(model, method, seed) for seed in range(options.images)]
            row[method] = sum(tokens for tokens, _ in counted) / sum(passes for _, passes in counted)
        rows.append(row)
        print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"spread": options.spread, "vocab": options.vocab, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
