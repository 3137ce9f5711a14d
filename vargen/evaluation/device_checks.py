"""Checks of a device: do kernels and CUDA graphs give the results of torch alone?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vargen.device import GRAPHS_VARIABLE
from vargen.evaluation.device_report import Row, SkipPart, WrongResult
from vargen.kernels.dispatch import KERNELS_ENV

PROMPTS = ("a red apple", "a cat with a hat, 3d", "a blue car", "pizza")
_SEED = 7
# By variant: VARGEN_KERNELS and VARGEN_CUDA_GRAPHS.
BACKEND_SETTINGS = {
    "torch": ("reference", "0"),
    "kernels": ("triton", "0"),
    "torch, graphs": ("reference", "1"),
    "kernels, graphs": ("triton", "1"),
}


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Set the environment variables of a variant in the block; not thread-safe, but a part has its process for itself."""
    before = {key: os.environ.get(key) for key in (KERNELS_ENV, GRAPHS_VARIABLE)}
    os.environ.update(zip(before, BACKEND_SETTINGS[name], strict=True))
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def list_variants(device: str) -> list[str]:
    return list(BACKEND_SETTINGS) if device == "cuda" else ["torch"]


def check_kernels(device: str) -> Iterator[Row]:
    """Every kernel against the references, over shapes and dtypes, then under compute-sanitizer where it is installed."""
    from vargen.evaluation import kernel_check
    from vargen.kernels.launch import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        raise SkipPart("needs CUDA: Triton kernels run on NVIDIA GPUs")
    wrong = []
    for kernel, case, error in kernel_check.compare_kernels(torch.device(device)):
        if error:
            wrong.append(f"{kernel} ({case}): {error}")
        yield {"kernel": kernel, "case": case, "result": error or "right"}
    if device == "cuda":
        try:
            error = kernel_check.run_sanitizer(60.0)
        except FileNotFoundError as missing:
            error = f"skipped: {missing}"
        yield {"kernel": "all", "case": "compute-sanitizer, small cases", "result": error or "right"}
    if wrong:
        raise WrongResult("\n".join(wrong))


def check_tokens(device: str) -> Iterator[Row]:
    """Whether kernels and graphs generate the tokens of torch alone in float32, and how many are equal in bfloat16."""
    from vargen.decoding import resolve_method
    from vargen.pipelines.registry import open_pipeline

    different = []
    for model in ("emoji", "emoji-var"):
        pipe: Any = open_pipeline(model, torch_dtype=torch.float32).to(device)
        half: Any = open_pipeline(model, torch_dtype=torch.bfloat16).to(device)
        for each in (pipe, half):
            each.set_progress_bar_config(disable=True)
        baseline: torch.Tensor | None = None
        for method in list_core_methods(pipe):
            expected, passes = _generate(pipe, method, "torch")
            baseline = expected if baseline is None else baseline
            for variant in list_variants(device)[1:]:
                tokens, count = _generate(pipe, method, variant)
                share = float((tokens == expected).float().mean())
                if share < 1:
                    different.append(f"{model}, {method}, {variant}: {100 * share:.1f} % of the tokens are equal")
                yield _tokens_row(model, method, variant, "float32", share, count, "torch in float32")
            if resolve_method(method).sequential_tokens:  # up to rounding, in which a wide pass differs from a narrow one
                share = float((expected == baseline).float().mean())
                yield _tokens_row(model, method, "torch", "float32", share, passes, pipe.baseline)
            tokens, count = _generate(half, method, list_variants(device)[-1])
            share = float((tokens == expected).float().mean())
            yield _tokens_row(model, method, list_variants(device)[-1], "bfloat16", share, count, "torch in float32")
    if different:
        raise WrongResult("\n".join(different))


def list_core_methods(pipe: Any) -> list[str]:
    """Names of the core methods that a model can run, its baseline first; `auto` is left out, since its passes follow times."""
    from vargen.decoding import resolve_method
    from vargen.decoding.method import DEFAULT_METHOD

    names = [each.name for each in pipe.list_methods() if each.unsupported_reason is None]
    names = [name for name in names if not resolve_method(name).experimental]
    return [pipe.baseline, *(name for name in names if name not in (pipe.baseline, DEFAULT_METHOD))]


def _generate(pipe: Any, method: str, variant: str) -> tuple[torch.Tensor, int]:
    prompts = list(PROMPTS[:2])
    seeds = [torch.Generator().manual_seed(_SEED + i) for i in range(len(prompts))]
    with use_variant(variant):
        result = pipe(prompts, accelerator=method, generator=seeds, output_type="latent")
    tokens = result.images
    flat = torch.cat([each.flatten(1) for each in tokens], 1) if isinstance(tokens, list | tuple) else tokens.flatten(1)
    return flat.cpu(), result.stats.passes


def _tokens_row(model: str, method: str, variant: str, dtype: str, share: float, passes: int, reference: str) -> Row:
    return {
        "model": model,
        "method": method,
        "variant": variant,
        "dtype": dtype,
        "equal tokens": f"{100 * share:.1f} %",
        "of": reference,
        "passes": passes,
    }
