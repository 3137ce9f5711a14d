"""What depends on the GPU, checked and measured in five parts, each in a process of its own.

    python benchmarks/gpu.py -o DIR [--part tokens] [--minutes 9] [--device cuda]

A row is on disk as soon as it is measured. Repeated with the same folder, a run goes on with the rows that are missing, so that
the parts fit into several calls; a row whose process crashed is reported and not tried again. Packaged models whose folders are
missing are left out: `assets/emoji` is enough for most rows. `DIR/report.md` has the tables of all parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Case = tuple[str, Callable[[], Row]]  # a name, unique in its part, and what measures a row
PROMPTS = ["a red apple", "a cat with a hat, 3d", "a blue car", "pizza"]
UNFINISHED = {"result": "did not end"}
VARIANTS = {  # VARGEN_KERNELS and VARGEN_EAGER
    "torch": ("reference", "1"),
    "kernels": ("triton", "1"),
    "torch, graphs": ("reference", "0"),
    "kernels, graphs": ("triton", "0"),
}


def variants(device: str) -> list[str]:
    return list(VARIANTS) if device == "cuda" else ["torch"]


def use(variant: str) -> None:
    os.environ.update(zip(("VARGEN_KERNELS", "VARGEN_EAGER"), VARIANTS[variant], strict=True))


def packaged(*names: str) -> list[str]:
    """Return the packaged models among `names` whose weights are here."""
    from vargen.assets import packaged_models

    return [name for name in names if name in packaged_models()]


def open_pipe(name: str, device: str, dtype: str = "float32") -> Any:
    import torch

    from vargen import open_pipeline

    pipe: Any = open_pipeline(name, torch_dtype=getattr(torch, dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def core_methods(pipe: Any) -> list[str]:
    """Names of the core methods that a model can run, its baseline first, without `auto`, whose passes follow times."""
    from vargen.decoding import resolve_method

    names = [each.name for each in pipe.list_methods() if each.unsupported_reason is None and each.name != "auto"]
    return sorted((name for name in names if not resolve_method(name).experimental), key=lambda name: name != pipe.baseline)


def check_kernels(device: str) -> Iterator[Case]:
    """Triton kernels against plain references, on small cases."""
    import torch

    from vargen.kernels.dispatch import CHECKS

    for name, check in CHECKS.items():
        yield name, partial(lambda check: {"result": check(torch.device(device)) or "right"}, check)


def check_tokens(device: str) -> Iterator[Case]:
    """Tokens by kernels, by graphs and in bfloat16, beside those of torch alone in float32."""
    import torch

    def generate(pipe: Any, method: str, variant: str) -> Any:
        use(variant)
        seeds = [torch.Generator().manual_seed(7 + i) for i in range(2)]
        result = pipe(PROMPTS[:2], accelerator=method, generator=seeds, output_type="latent")
        parts = result.images if isinstance(result.images, list | tuple) else [result.images]
        return torch.cat([each.flatten(1) for each in parts], 1).cpu(), result.stats.passes

    def measure(pipe: Any, each: Any, method: str, variant: str) -> Row:
        tokens, passes = generate(each, method, variant)
        equal = (tokens == reference(pipe, method)[0]).float().mean()
        return {"equal tokens": f"{100 * float(equal):.1f} %", "passes": passes}

    reference = cache(partial(generate, variant="torch"))  # one for all rows of a method
    for model in packaged("emoji", "emoji-var"):
        pipes = {dtype: open_pipe(model, device, dtype) for dtype in ("float32", "bfloat16")}
        for method in core_methods(pipes["float32"]):
            for dtype, each in pipes.items():
                for variant in variants(device):
                    name = f"{model}, {method}, {dtype}, {variant}"
                    yield name, partial(measure, pipes["float32"], each, method, variant)


def measure_passes(device: str) -> Iterator[Case]:
    """Milliseconds of a pass by its tokens, beside reading the weights once; official sizes have random weights."""
    import torch

    from vargen.bench.passes import decode_images, measure_steps, open_benchmark_model

    def measure(network: Any, widths: list[int], variant: str) -> Row:
        use(variant)
        report = measure_steps(network, widths, [1], guidance=True, rounds=3)
        row = {f"{each.tokens} tokens, ms": each.milliseconds for each in report.results}
        return {"dtype": report.dtype, **row, "weights read once, ms": report.read_milliseconds}

    def measure_whole(network: Any, compiled: bool) -> Row:
        use("torch, graphs")
        if compiled:
            network.transformer.compile_repeated_blocks(fullgraph=True)
        stats = decode_images(network, 1)
        return {"whole step of 1 token, ms": 1e3 * stats.seconds / stats.passes}

    official = ["llamagen-b", "llamagen-xl", "llamagen-3b", "var-d16", "var-d30"] if device == "cuda" else ["llamagen-b"]
    for name in [*packaged("emoji"), *official]:
        dtype = torch.float32 if device == "cpu" or name == "emoji" else torch.bfloat16
        network = open_benchmark_model(name, dtype, torch.device(device))
        next_token, scales = network.pipe.paradigm == "next-token", getattr(network.transformer, "scales", ())
        widths = [1, 16, 64] if next_token else [scales[i] ** 2 for i in (0, len(scales) // 2, -1)]
        for variant in [each for each in variants(device) if "graphs" not in each]:
            yield f"{name}, {variant}", partial(measure, network, widths, variant)
        for compiled in (False, True) if device == "cuda" and next_token else ():
            yield f"{name}, {'compiled and ' * compiled}captured", partial(measure_whole, network, compiled)


def measure_methods(device: str) -> Iterator[Case]:
    """Seconds per image of core methods, each beside the baseline in the same run; then `gumbel` on an official size."""
    from vargen.bench.compare import compare_methods
    from vargen.decoding import resolve_method

    histogram: list[int] = []

    def measure(pipe: Any, method: str, variant: str) -> Row:
        use(variant)
        compared = {name: resolve_method(name) for name in (pipe.baseline, method)}
        found = compare_methods(pipe, PROMPTS, compared).methods[1]
        if method == "gumbel":
            histogram[:] = found.committed_histogram
        return {
            "tokens per pass": found.tokens_per_pass, "seconds per image": found.seconds_per_image,
            "baseline / method": found.speedup, "identical": f"{found.num_identical_images} of {found.images}",
        }  # fmt: skip

    for model in packaged("emoji", "emoji-var"):
        pipe = open_pipe(model, device)
        for method in core_methods(pipe)[1:]:
            for variant in dict.fromkeys(["torch", variants(device)[-1]]):
                yield f"{model}, {method}, {variant}", partial(measure, pipe, method, variant)
                if method == "gumbel" and histogram:  # empty if its row is of an earlier call
                    yield f"official size, gumbel replayed, {variant}", partial(replay, device, variant, histogram)


def replay(device: str, variant: str, histogram: list[int]) -> Row:
    """Measure `gumbel` on random weights of an official size that accept as often as a measured histogram says.

    Random weights accept nearly no draft. Drafting, passes and sampling are real, the number of accepted tokens is replayed.
    """
    import torch

    from vargen.bench.passes import decode_images, open_benchmark_model
    from vargen.decoding import resolve_method
    from vargen.decoding.interfaces import AcceptanceRule
    from vargen.decoding.noise import Purpose
    from vargen.decoding.tree import Verdict

    counts = torch.tensor([0, *histogram[1:]], dtype=torch.float64, device=device)
    cumulative = (counts.cumsum(0) / counts.sum()).float()

    class Replayed(AcceptanceRule):
        exact = False

        def __call__(self, probs: Any, draft: Any, noise: Any, relaxation: Any) -> Verdict:
            uniform = noise.uniform(Purpose.ACCEPT)[:, :1].contiguous()
            count = torch.searchsorted(cumulative, uniform)[:, 0].clamp(min=1, max=probs.shape[1])
            sampled = noise.sample(probs, Purpose.RESAMPLE).gather(1, (count - 1)[:, None])[:, 0]
            path = torch.arange(probs.shape[1], device=probs.device).expand(probs.shape[:2])
            return Verdict(path, count, sampled, relaxation=torch.zeros_like(relaxation))

    use(variant)
    name, dtype = ("llamagen-xl", torch.bfloat16) if device == "cuda" else ("llamagen-b", torch.float32)
    network = open_benchmark_model(name, dtype, torch.device(device))
    method = dataclasses.replace(resolve_method("gumbel"), name="gumbel, replayed", acceptance=Replayed())
    one, many = (decode_images(network, 1, each) for each in ("ar", method))
    return {"tokens per pass": many.tokens_per_pass, "baseline / method": many.tokens_per_second / one.tokens_per_second}


def measure_batches(device: str) -> Iterator[Case]:
    """Tokens per second and peak memory by batch size."""
    import torch

    from vargen.bench.passes import decode_images, open_benchmark_model

    def measure(network: Any, batch: int, method: str) -> Row:
        use(variants(device)[-1])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        stats = decode_images(network, batch, method)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else "not measured on a CPU"
        return {"tokens/s": stats.tokens_per_second, "ms per pass": 1e3 * stats.seconds / stats.passes, "peak GiB": peak}

    for name in packaged("emoji"):
        network = open_benchmark_model(name, torch.float32, torch.device(device))
        for batch in (1, 4, 16, 64) if device == "cuda" else (1, 4):
            for method in (network.pipe.baseline, "gumbel"):
                yield f"{name}, batch {batch}, {method}", partial(measure, network, batch, method)


PARTS = {
    "tokens": check_tokens, "passes": measure_passes, "methods": measure_methods, "kernels": check_kernels,
    "batches": measure_batches,
}  # fmt: skip


def read_rows(file: Path) -> dict[str, Row]:
    """Return the rows of a part by name; one that was begun and never ended has a `result` that says so."""
    rows: dict[str, Row] = {}
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            name, row = json.loads(line)
        except ValueError:  # the process was killed while writing
            continue
        rows[name] = UNFINISHED if row is None else row
    return rows


def forget_unfinished(file: Path) -> None:
    """Remove the row that was being measured when its time was over, so that the next call measures it again."""
    rows = {name: row for name, row in read_rows(file).items() if row != UNFINISHED}
    file.write_text("".join(json.dumps([name, row]) + "\n" for name, row in rows.items()), "utf-8")


def run_cases(cases: Iterator[Case], file: Path, seconds: float) -> None:
    """Measure the rows that `file` lacks, until `seconds` are over, appending a line before and after each."""
    end, done = time.monotonic() + seconds, read_rows(file)
    with file.open("a", encoding="utf-8") as lines:
        for name, measure in cases:
            if name in done:
                continue
            if time.monotonic() > end:
                return
            print(json.dumps([name, None]), file=lines, flush=True)
            try:
                row = measure()
            except Exception:
                row = {"result": traceback.format_exc()[-800:]}
            print(json.dumps([name, row]), file=lines, flush=True)


def write_report(folder: Path, names: list[str], endings: dict[str, str]) -> None:
    """Write the tables of all parts to `report.md`."""
    from vargen.device import describe_machine

    text = ["# GPU report", "", "```", json.dumps(describe_machine(), default=str), "```"]
    for name in names:
        rows = read_rows(folder / f"{name}.jsonl")
        heads = list(dict.fromkeys(key for row in rows.values() for key in row))
        text += ["", f"## {name}: {(PARTS[name].__doc__ or '').strip()}", "", endings.get(name, ""), ""]
        text += ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for case, row in rows.items():
            cells = (f"{v:.4g}" if isinstance(v := row.get(head, ""), float) else str(v) for head in heads)
            text.append(f"| {case} | " + " | ".join(cell.replace("\n", " ").replace("|", "/") for cell in cells) + " |")
    (folder / "report.md").write_text("\n".join(text) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, folder = options.part or list(PARTS), options.output
    folder.mkdir(parents=True, exist_ok=True)
    if options.worker is not None:
        run_cases(PARTS[names[0]](options.device), folder / f"{names[0]}.jsonl", options.worker)
        return
    end, endings = time.monotonic() + 60 * options.minutes, dict[str, str]()
    for number, name in enumerate(names):
        seconds = (end - time.monotonic()) / (len(names) - number)
        words = ["-o", str(folder), "--part", name, "--device", options.device, "--worker", str(0.8 * seconds)]
        try:
            done = subprocess.run(
                [sys.executable, __file__, *words], timeout=max(seconds, 1), stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
                endings[name] = f"The process ended with {how}: {done.stderr[-800:]}"
        except subprocess.TimeoutExpired:
            endings[name] = "Stopped when its time was over; run it again to go on."
            forget_unfinished(folder / f"{name}.jsonl")
        write_report(folder, names, endings)
        print(name, endings.get(name, "done"), flush=True)


if __name__ == "__main__":
    main()
