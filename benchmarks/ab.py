"""Images of a packaged model by two checkouts of vargen, in turn: processor time, one thread, medians.

    python benchmarks/ab.py OLD NEW [--model emoji] [--methods ar,gumbel,mulo] [--rounds 8]

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

# The pipelines, kernels and assets of a checkout are imported as parts of vargen, as an installed one has them.
WORKER = """
import hashlib, json, sys, time
import torch
import vargen

torch.set_num_threads(1)
pipe = vargen.open_pipeline(sys.argv[1], torch_dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
print(vargen.__file__, flush=True)
for line in sys.stdin:
    start, seed = time.process_time(), torch.Generator().manual_seed(7)
    image = pipe("a red apple", accelerator=line.strip(), generator=seed).images[0]
    print(json.dumps([time.process_time() - start, hashlib.sha256(image.tobytes()).hexdigest()]), flush=True)
"""


def start_worker(checkout: Path, space: Path, model: str) -> subprocess.Popen[str]:
    """Start a process that imports vargen from a checkout."""
    home = Path(tempfile.mkdtemp(dir=space)) / "vargen"
    home.mkdir()
    for part in (*(checkout / "vargen").iterdir(), *(checkout / name for name in ("pipelines", "kernels", "assets"))):
        if not (home / part.name).exists():
            (home / part.name).symlink_to(part)
    environment = {**os.environ, "PYTHONPATH": str(home.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, model], env=environment, cwd=space, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    if not worker.stdout or not worker.stdout.readline().startswith(str(home)):
        raise SystemExit(f"vargen could not be imported from {checkout}")
    return worker


def ask(worker: subprocess.Popen[str], method: str) -> tuple[float, str]:
    """Return the seconds of an image, and its digest."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(method + "\n")
    worker.stdin.flush()
    seconds, digest = json.loads(worker.stdout.readline())
    return seconds, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--methods", default="ar,gumbel,mulo", help="with commas between")
    parser.add_argument("--rounds", type=int, default=8, help="images of each checkout and method")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as space:
        pair = [start_worker(folder.resolve(), Path(space), options.model) for folder in (options.old, options.new)]
        print(f"{'':8}{'old s':>10}{'new s':>10}{'ratio':>8}   same image")
        for method in options.methods.split(","):
            digests = [ask(worker, method)[1] for worker in pair]  # warm
            seconds: tuple[list[float], list[float]] = ([], [])
            for turn in range(options.rounds):
                for i in (turn % 2, 1 - turn % 2):
                    seconds[i].append(ask(pair[i], method)[0])
            old, new = map(statistics.median, seconds)
            print(f"{method:8}{old:10.3f}{new:10.3f}{new / old:8.2f}   {digests[0] == digests[1]}", flush=True)
        for worker in pair:
            worker.kill()


if __name__ == "__main__":
    main()
