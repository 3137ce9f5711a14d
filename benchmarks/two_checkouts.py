"""Passes and pictures of the packaged model by two checkouts of vargen, in turn: processor time, one thread, medians.

    python benchmarks/two_checkouts.py OLD NEW [--passes 1,4,16] [--rounds 40] [--count 25] [--pictures 4]

OLD and NEW are folders of the repository, say of `git worktree add ../old COMMIT`. Each runs in a process of its own; they take
turns, so that a drift of the machine meets both alike. Dependencies are those of the Python that runs this.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The pipelines, kernels and assets of a checkout are imported as parts of vargen, as an installed one has them.
WORKER = """
import importlib.util, json, sys, time
import torch
import vargen.device
from vargen import LlamaGenPipeline
from vargen.decoding import Sampling, Tree, decode

make_chain = getattr(Tree, "make_chain", None) or Tree.of_chain  # its name in older checkouts

torch.set_num_threads(1)
pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
condition, _ = (getattr(pipe, "encode_condition", None) or pipe.condition)("a red apple")  # its name until 0.1
settings = pipe.default_sampling
sampling = Sampling(settings["temperature"], settings["top_k"], settings["top_p"])
model = getattr(pipe, "decoding_model", None) or pipe.token_model  # its name until 0.1
model = model(settings["guidance_scale"])
inference = hasattr(vargen.device, "inference_mode_for") or importlib.util.find_spec("vargen.modes")
mode = torch.inference_mode if inference else torch.no_grad
fed = torch.randint(4096, (1, 16), generator=torch.Generator().manual_seed(5))
with mode():
    cache, _ = model.prefill(condition, 16)
    for _ in range(8):
        model.forward(fed, cache, make_chain(15))
        model.commit(cache, torch.arange(16)[None], torch.tensor([16]), make_chain(15))

def do(what, count):
    seconds = []
    for _ in range(count):
        start = time.process_time()
        if what.isdigit():
            with mode():
                result = model.forward(fed[:, : int(what)].contiguous(), cache, make_chain(int(what) - 1)).logits
        else:
            with torch.no_grad():
                result = decode(model, condition, torch.tensor([7]), what, sampling).tokens
        seconds.append(time.process_time() - start)
    return seconds, result.double().flatten().tolist()

print(vargen.__file__, flush=True)
for line in sys.stdin:
    print(json.dumps(do(*json.loads(line))), flush=True)
"""


def started(checkout: Path, space: Path) -> subprocess.Popen[str]:
    """A process that imports vargen from a checkout."""
    home = Path(tempfile.mkdtemp(dir=space)) / "vargen"
    home.mkdir()
    for part in (*(checkout / "vargen").iterdir(), *(checkout / name for name in ("pipelines", "kernels", "assets"))):
        if not (home / part.name).exists():
            (home / part.name).symlink_to(part)
    environment = {**os.environ, "PYTHONPATH": str(home.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], env=environment, cwd=space, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert worker.stdout is not None
    if not worker.stdout.readline().startswith(str(home)):
        raise SystemExit(f"vargen could not be imported from {checkout}")
    return worker


def asked(worker: subprocess.Popen[str], what: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each repetition, and the last one's logits or tokens."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps([what, count]) + "\n")
    worker.stdin.flush()
    seconds, result = json.loads(worker.stdout.readline())
    return seconds, result


def compare(pair: list[subprocess.Popen[str]], what: str, rounds: int, count: int) -> str:
    """A line of the table."""
    seconds: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    for worker in pair:  # warm
        asked(worker, what, 1)
    for turn in range(rounds):
        for i in (turn % 2, 1 - turn % 2):
            times, results[i] = asked(pair[i], what, count)
            seconds[i].extend(times)
    old, new = (1e3 * statistics.median(times) for times in seconds)
    low, least = (1e3 * sorted(times)[len(times) // 10] for times in seconds)
    apart = max(abs(a - b) for a, b in zip(*results, strict=True))
    return f"{what:>8}{old:10.2f}{new:10.2f}{new / old:8.2f}{low:12.2f}{least:10.2f}{least / low:8.2f}   {apart:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--passes", default="1,4,16", help="tokens fed, with commas between")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--count", type=int, default=25, help="passes of a visit")
    parser.add_argument("--pictures", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as space:
        pair = [started(folder.resolve(), Path(space)) for folder in (options.old, options.new)]
        print(f"{'':8}{'old ms':>10}{'new ms':>10}{'ratio':>8}{'old lowest':>12}{'new':>10}{'ratio':>8}   results differ by")
        for width in options.passes.split(","):
            print(compare(pair, width, options.rounds, options.count), flush=True)
        for method in ("ar", "gumbel") if options.pictures else ():
            print(compare(pair, method, options.pictures, 1), flush=True)
        for worker in pair:
            worker.kill()


if __name__ == "__main__":
    main()
