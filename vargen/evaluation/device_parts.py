"""Parts of the device report, in order of worth: checks first, then the cost of passes, methods, batches, images and videos.

Passes are timed in the variants that a device has: torch alone, Triton kernels, and CUDA graphs.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vargen.device import describe_machine
from vargen.evaluation.device_checks import PROMPTS, check_kernels, check_tokens, list_core_methods, list_variants, use_variant
from vargen.evaluation.device_report import Part, Row


def measure_passes(device: str) -> Iterator[Row]:
    """Cost of a pass by its tokens, beside reading the weights once. Official sizes have random weights."""
    from vargen.evaluation.networks import BenchmarkModel, open_benchmark_model
    from vargen.evaluation.speed import measure_steps

    place = torch.device(device)
    names = ["emoji", "llamagen-b", "var-d16"]
    if device == "cuda":
        names = ["emoji", "llamagen-xl", "llamagen-3b", "llamagen-b", "var-d30", "var-d16"]
    for name in names:
        dtype = torch.float32 if device == "cpu" or name == "emoji" else torch.bfloat16
        network = open_benchmark_model(name, dtype, place)
        next_token = network.pipe.paradigm == "next-token"
        widths = [1, 4, 16, 64] if next_token else _scale_widths(network)
        cases: list[tuple[str, BenchmarkModel]] = [(each, network) for each in list_variants(device) if "graphs" not in each]
        if device == "cuda" and next_token:
            cases.append(("kernels, graphs", _capture_passes(network)))
        for variant, model in cases:
            with use_variant(variant):
                report = measure_steps(model, widths, [1], guidance=True, rounds=3)
            for each in report.results:
                yield {
                    "model": name,
                    "paradigm": network.pipe.paradigm,
                    "dtype": report.dtype,
                    "variant": variant,
                    "tokens": each.tokens,
                    "ms": each.milliseconds,
                    "x weights read once": each.over_read,
                    "GB/s": report.gigabytes_per_second,
                }
        if device == "cuda" and next_token:
            yield _compiled_row(network)


def _compiled_row(network: Any) -> Row:
    """A step of the baseline with a compiled pass, and with what is beside the pass."""
    from vargen.evaluation.speed import measure_baseline

    report = measure_baseline(network, 1, seconds=0.0, compile=True)
    return {
        "model": network.name,
        "paradigm": network.pipe.paradigm,
        "dtype": report.dtype,
        "variant": "compiled, whole step",
        "tokens": 1,
        "ms": report.milliseconds_per_pass,
        "x weights read once": "not measured",
        "GB/s": "not measured",
    }


def _scale_widths(network: Any) -> list[int]:
    scales = network.transformer.scales
    return [scales[index] ** 2 for index in (0, len(scales) // 2, -1)]


def _capture_passes(network: Any) -> Any:
    """Return the model with passes that are replays of CUDA graphs."""
    from vargen.decoding.next_token.graphs import CUDAGraph
    from vargen.evaluation.networks import BenchmarkModel

    class CapturedModel(BenchmarkModel):
        @torch.no_grad()
        def passes(self, rows: int, widths: Sequence[int]) -> dict[int, Callable[[], Any]]:
            captured: dict[int, Callable[[], Any]] = {}
            for width, run in super().passes(rows, widths).items():
                run()  # compiles and allocates
                torch.cuda.synchronize()
                replay, outputs = CUDAGraph.capture(lambda run=run: (run().logits,))  # type: ignore[misc]
                # A graph reads and writes addresses, and keeps no tensor alive: the function does.
                captured[width] = lambda replay=replay, used=(run, outputs): replay()  # type: ignore[misc]
            return captured

    return CapturedModel(network.name, network.pipe)


def compare_core_methods(device: str) -> Iterator[Row]:
    """Core methods on the packaged models, each with the baseline in the same run."""
    from vargen.decoding import resolve_method
    from vargen.evaluation.compare import compare_methods
    from vargen.pipelines.registry import open_pipeline

    for model in ("emoji", "emoji-var"):
        pipe: Any = open_pipeline(model, torch_dtype=torch.float32).to(device)
        pipe.set_progress_bar_config(disable=True)
        for method in list_core_methods(pipe)[1:]:
            compared = {name: resolve_method(name) for name in (pipe.baseline, method)}
            for variant in ["torch", "kernels, graphs"] if device == "cuda" else ["torch"]:
                with use_variant(variant):
                    _, found = compare_methods(pipe, list(PROMPTS), compared).methods
                if method == "gumbel":
                    histogram = found.committed_histogram
                yield {
                    "model": model,
                    "method": method,
                    "variant": variant,
                    "tokens per pass": found.tokens_per_pass,
                    "seconds per image": found.seconds_per_image,
                    "baseline / method": found.speedup,
                    "efficiency": found.efficiency,
                    "identical images": f"{found.num_identical_images} of {found.images}",
                }
            if method == "gumbel":
                yield from _replay(device, histogram)


def _replay(device: str, histogram: Sequence[int]) -> Iterator[Row]:
    """`gumbel` on an official size with random weights that accepts as often as the packaged model does."""
    from vargen.decoding import resolve_method
    from vargen.evaluation.networks import open_benchmark_model
    from vargen.evaluation.replay import replay_acceptance
    from vargen.evaluation.speed import measure_baseline

    name, dtype = ("llamagen-xl", torch.bfloat16) if device == "cuda" else ("llamagen-b", torch.float32)
    network = open_benchmark_model(name, dtype, torch.device(device))
    for variant in ["torch", "kernels, graphs"] if device == "cuda" else ["torch"]:
        with use_variant(variant):
            one = measure_baseline(network, 1, seconds=0.0)
            many = measure_baseline(network, 1, seconds=0.0, accelerator=replay_acceptance(resolve_method("gumbel"), histogram))
        tokens = many.tokens_per_second / 1e3 * many.milliseconds_per_pass
        yield {
            "model": f"{name}, random weights",
            "method": "gumbel, acceptance replayed from emoji",
            "variant": variant,
            "tokens per pass": tokens,
            "seconds per image": network.pipe.num_tokens / many.tokens_per_second,
            "baseline / method": many.tokens_per_second / one.tokens_per_second,
            "efficiency": one.milliseconds_per_pass / many.milliseconds_per_pass,
            "identical images": "does not apply",
        }


def measure_batches(device: str) -> Iterator[Row]:
    """Tokens per second and peak memory by batch size."""
    from vargen.evaluation.networks import open_benchmark_model
    from vargen.evaluation.speed import measure_baseline

    place = torch.device(device)
    network = open_benchmark_model("emoji", torch.float32, place)
    for batch in (1, 4, 16, 64) if device == "cuda" else (1, 4):
        for method in (network.pipe.baseline, "gumbel"):
            for variant in list_variants(device)[-1:]:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                with use_variant(variant):
                    report = measure_baseline(network, batch, seconds=0.0, accelerator=method)
                peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
                yield {
                    "model": "emoji",
                    "batch": batch,
                    "method": method,
                    "variant": variant,
                    "tokens/s": report.tokens_per_second,
                    "ms per pass": report.milliseconds_per_pass,
                    "peak GiB": "not measured on a CPU" if peak is None else peak,
                }


def measure_scale_images(device: str) -> Iterator[Row]:
    """Whole images of next-scale models, beside the published loop in the same run."""
    from vargen.evaluation.image_speed import measure_image_speed
    from vargen.evaluation.networks import open_benchmark_model

    names = ["emoji-var", "var-d16", "var-d30"] if device == "cuda" else ["emoji-var"]
    for name in names:
        dtype = torch.float32 if device == "cpu" or name == "emoji-var" else torch.bfloat16
        network = open_benchmark_model(name, dtype, torch.device(device))
        for batch in (1, 8) if device == "cuda" else (1,):
            report = measure_image_speed(network, batch, rounds=3)
            yield {
                "model": name,
                "dtype": report.dtype,
                "batch": batch,
                "ms per image": report.token_milliseconds,
                "with pixels": report.token_milliseconds + report.pixel_milliseconds,
                "published loop / ours": report.speedup,
                "of the roofline": f"{100 * report.roofline_fraction:.0f} %",
            }


def measure_videos(device: str) -> Iterator[Row]:
    """Blocks of a causal video transformer; on a GPU, of Self-Forcing's layout with random weights (no pixels decoded)."""
    from vargen.adapters.causal_video import CausalVideoBlockModel
    from vargen.decoding.video.denoising import shifted_levels
    from vargen.models.causal_video import CausalVideoTransformer
    from vargen.models.condition import Condition
    from vargen.pipelines.registry import open_pipeline

    if device == "cuda":
        with torch.device("cuda"), torch.no_grad():
            network = CausalVideoTransformer().to(torch.bfloat16).eval()
        name, levels, window = "Self-Forcing's layout, 1.3B, random weights", shifted_levels(), 21
    else:
        pipe: Any = open_pipeline("emoji-video", torch_dtype=torch.float32)
        name, network, levels, window = "emoji-video", pipe.transformer, tuple(pipe.setting("levels")), None
    model = CausalVideoBlockModel(network, levels, window=window)
    blocks, frames = 7, model.block_shape[0]
    rows = network.config.text_len or 512
    caption = torch.randn(1, rows, network.config.text_dim, device=model.device)
    state = model.start(Condition(caption_embeds=caption), blocks * frames)
    clean: list[torch.Tensor] = []
    with torch.inference_mode():
        for block in range(blocks):
            start = time.perf_counter()
            noisy = torch.randn(1, *model.block_shape, device=model.device)
            for level in levels:
                found = model.forward(state, clean, noisy, level)
                assert found is not None
                clean, noisy = [], found  # the time of a step does not depend on its input
            clean = [noisy]
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            shown = frames * network.geometry.temporal_stride
            yield {
                "model": name,
                "dtype": str(network.dtype).removeprefix("torch."),
                "block": block + 1,
                "steps": len(levels),
                "seconds": seconds,
                "frames of video per second": shown / seconds,
            }


def describe_device(device: str) -> dict[str, str]:
    """Return the machine and the software for the head of the report, by name."""
    from vargen import __version__
    from vargen.compat import installed_version

    machine = describe_machine()
    versions = {
        "vargen": __version__,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "CUDA": torch.version.cuda,
    }
    gpus = ", ".join(f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in machine["gpus"]) or "none"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "device": device,
        "gpu": gpus,
        "cpu": f"{machine['cpu']}, {machine['cores']} cores",
        "software": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": commit.stdout.strip() or "not a checkout",
    }


PARTS = {
    "kernels": Part("Kernels against the references", check_kernels, 2),
    "tokens": Part("The same tokens by torch, kernels and graphs", check_tokens, 2),
    "passes": Part("Cost of a pass", measure_passes, 3),
    "methods": Part("Core methods beside the baseline", compare_core_methods, 3),
    "batches": Part("Batch sizes and memory", measure_batches, 2),
    "images": Part("Next-scale images beside the published loop", measure_scale_images, 2),
    "videos": Part("Video blocks", measure_videos, 1),
}
