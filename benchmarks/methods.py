"""All methods that a next-token model can run, on the same weights, prompts and sampling: tokens per pass, seconds, what lies
beside the pass, relaxation and quality, at the model's own sampling and at temperature 1 without filters.

    python benchmarks/methods.py [--model emoji] [--pictures 64] [--prompts FILE] [--output runs/methods] [--json FILE]

Speed by `vargen compare`, one picture at once; quality by `vargen eval`, which goes on where it was stopped. Both are the
commands that users have. A second table projects the same acceptance to the roofline of a GPU (see `projected`): it is
arithmetic on sizes, not a measurement.
"""

import argparse
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from vargen.decoding import PRESETS
from vargen.decoding.next_token.drafters import Eagle, Jacobi, LayerSkip, Medusa, Speculative, SpeculativeTree
from vargen.deprecation import RENAMED_FIELDS
from vargen.evaluation.compare import MethodResult
from vargen.pipelines.registry import open_pipeline

DEFAULTS, PLAIN = "as packaged", "temperature 1, no filters"


@dataclass(frozen=True)
class GPU:
    """Bytes a second from memory and bfloat16 operations a second, as measured on one (`triton_perf`: H200)."""

    name: str = "H200"
    bandwidth: float = 4.3e12
    operations: float = 790e12


@dataclass(frozen=True)
class Shape:
    """A LlamaGen transformer in bfloat16, with guidance: two rows for one picture."""

    name: str
    layers: int
    dim: int
    vocab: int = 16384
    cached: int = 408  # 120 slots of text and half of 24 x 24 tokens

    @property
    def layer(self) -> int:
        """Weights of one."""
        hidden = -(-(8 * self.dim // 3) // 256) * 256
        return 4 * self.dim**2 + 3 * self.dim * hidden

    @property
    def head(self) -> int:
        return self.dim * self.vocab

    def seconds(
        self, gpu: GPU, fed: float, layers: float | None = None, head: float = 1.0, overlap: bool = True, images: int = 1
    ) -> float:
        """Of a pass over `fed` tokens of each picture by some of the layers and a share of the output layer.

        Weights, keys and values, logits and activations go through memory once; with `overlap` the longer of memory and
        arithmetic counts, else their sum.
        """
        rows, layers = 2 * images, self.layers if layers is None else layers
        weights = layers * self.layer + head * self.head
        kept = 4 * layers * self.dim * (self.cached + fed)
        moved = 2 * weights + rows * (kept + 2 * fed * self.vocab * head + 24 * fed * self.dim * layers)
        work = rows * fed * (2 * weights + 4 * (self.cached + fed) * self.dim * layers)
        parts = moved / gpu.bandwidth, work / gpu.operations
        return max(parts) if overlap else sum(parts)


MODELS = (Shape("LlamaGen-B", 12, 768), Shape("LlamaGen-XL", 36, 1280), Shape("LlamaGen-3B", 24, 3200))


def drafting(name: str, tokens: float, shape: Shape, gpu: GPU, overlap: bool) -> float:
    """Seconds of a drafter's own passes behind one draft, of which `tokens` were committed.

    A small model is taken for one with a quarter of the layers; a low-resolution one, which draws a quarter of the tokens, for
    one with 0.3 of them, as the packaged ones are to one another. Up-samplers are left out.
    """

    def passes(widths: Iterable[int], layers: float) -> float:
        return sum(shape.seconds(gpu, fed, layers, overlap=overlap) for fed in widths)

    drafter = PRESETS[name].drafter
    if isinstance(drafter, Jacobi) and str(drafter.initial).startswith("low-res"):
        return passes([1], 0.3 * shape.layers) * tokens / 4
    if isinstance(drafter, Eagle):  # and its layer that joins feature and embedding
        return passes(drafter.tree_shape.expanded_per_level(), 1 + 2 * shape.dim**2 / shape.layer)
    if isinstance(drafter, Medusa):
        heads = drafter.tree_shape.depth
        return shape.seconds(gpu, heads, heads * 3 * shape.dim**2 / shape.layer, overlap=overlap)
    if isinstance(drafter, LayerSkip):
        return passes([1] * (drafter.max_width - 1), 0.6 * shape.layers)
    if isinstance(drafter, Speculative):
        return passes([2, *[1] * (drafter.max_width - 2)], shape.layers / 4)
    if isinstance(drafter, SpeculativeTree):
        return passes(
            [drafter.tree_shape.depth + 2, *list(accumulate(drafter.tree_shape.expanded_per_level()))[1:]], shape.layers / 4
        )
    return 0.0


def projected(method: dict[str, Any], shape: Shape, gpu: GPU, overlap: bool) -> float:
    """How many times as fast as one token a pass, from the tokens per pass and the fed widths that were measured on our model.

    Tokens per pass are taken as they are: another model accepts other shares of the same drafts.
    """
    steps = {int(width): passes for width, passes in method["passes_by_width"].items()}
    step = sum(shape.seconds(gpu, fed, overlap=overlap) * passes for fed, passes in steps.items()) / sum(steps.values())
    step += drafting(method["name"], method["tokens_per_pass"], shape, gpu, overlap) if max(steps) > 1 else 0.0
    return method["tokens_per_pass"] * shape.seconds(gpu, 1, overlap=overlap) / step


def measured(arguments: argparse.Namespace, setting: str, methods: list[str]) -> list[dict[str, Any]]:
    """A row for each method in one setting."""
    folder = arguments.output / setting.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    common = ["--model", arguments.model, "--threads", "1", "--methods", ",".join(methods)]
    if setting == PLAIN:
        vocabulary = open_pipeline(arguments.model).transformer.config.vocab_size
        common += ["--temperature", "1", "--top-p", "1", "--top-k", str(vocabulary)]
    speed = folder / "compare.json"
    if not speed.is_file():
        prompts = folder / "prompts.txt"
        prompts.write_text("\n".join(arguments.prompts.read_text("utf-8").split("\n")[: arguments.compared]) + "\n", "utf-8")
        command = ["vargen", "compare", "--prompt-file", str(prompts), "-o", str(folder / "compare.png"), "--json", str(speed)]
        subprocess.run([*command, *common], check=True)
    command = ["vargen", "eval", "-o", str(folder / "eval"), "--prompt-file", str(arguments.prompts), "--batch-size", "8"]
    subprocess.run([*command, "--num-images", str(arguments.pictures), *common], check=True, stdout=subprocess.DEVNULL)
    quality = {each["name"]: each for each in json.loads((folder / "eval" / "metrics.json").read_text())["methods"]}
    new_names = RENAMED_FIELDS[MethodResult.__name__]  # the file may be of an earlier version
    rows = [{new_names.get(key, key): value for key, value in row.items()} for row in json.loads(speed.read_text())["methods"]]
    return [row | {"quality": quality[row["name"]]} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    head = ["method", "", "tokens per pass", "speedup", "drafting", "rest beside the pass", "relaxation"]
    head += ["score less that of `ar`", "KID x 1000"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        share, quality = row["share_by_part"], row["quality"]
        (score,) = quality["scores"].values()
        difference = score.get("difference_to_baseline") or {"mean": 0.0, "ci95_half_width": 0.0}
        rest = share.get("accept", 0) + share.get("commit", 0)
        cells = [f"`{row['name']}`", row["kind"], f"{row['tokens_per_pass']:.2f}", f"{row['ratio']:.2f}"]
        cells += [f"{share.get('draft', 0):.0%}", f"{rest:.0%}", f"{row['relaxation_per_image']:.1f}"]
        cells += [f"{difference['mean']:+.2f} ± {difference['ci95_half_width']:.2f}"]
        distances = quality["distances"]  # of features of the packaged scorer; a Frechet distance asks for more pictures
        cells.append(f"{1e3 * distances['kid']:.2f} ± {1e3 * distances['kid_std']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def projection(rows: list[dict[str, Any]], gpu: GPU) -> str:
    head = ["method", "tokens per pass", *(shape.name for shape in MODELS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{projected(row, shape, gpu, False):.2f} to {projected(row, shape, gpu, True):.2f}" for shape in MODELS]
        lines.append(f"| `{row['name']}` | {row['tokens_per_pass']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/eval_prompts.txt"))
    parser.add_argument("--pictures", type=int, default=64, help="of each method, for its quality")
    parser.add_argument("--compared", type=int, default=16, help="prompts for its speed")
    parser.add_argument("--methods", default="", help="presets with commas between them; default: all that the model can run")
    parser.add_argument("--output", type=Path, default=Path("runs/methods"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    able = [method.name for method in open_pipeline(arguments.model).list_methods() if method.unsupported_reason is None]
    methods = arguments.methods.split(",") if arguments.methods else [name for name in able if name != "auto"]
    gpu, report = GPU(), {}
    for setting in (DEFAULTS, PLAIN):
        report[setting] = rows = measured(arguments, setting, methods)
        print(f"\n### Measured: {setting}\n\n{table(rows)}")
        print(f"\n### Projected on a {gpu.name}: {setting}\n\n{projection(rows, gpu)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
