"""Permutation tests of whether two sets of images follow the same distribution, computed on their tokens.

Three statistics: token marginals per position, pairs of neighboring tokens, and features of the tokenizer (codebook vectors
averaged over quarters of the image, and their spread). A permutation swaps whole images between the sets, each with the image
of the same prompt. So the tests allow dependent tokens within an image, and different prompts.

Shape suffixes: I images, N tokens of the grid, V vocabulary, C codebook width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.decoding import Method, resolve_method
from vargen.decoding.method import same_spec
from vargen.evaluation.decoders import open_decoder
from vargen.files import atomic_file
from vargen.pipelines.base import VisualPipeline
from vargen.weight_files import load_npz, weights_digest


@dataclass(frozen=True)
class TestResult:
    """`statistic` of the two sets, its mean over permutations, and the fraction of permutations that reach it.

    The observed assignment counts as one of the permutations.
    """

    __test__ = False  # keeps pytest from collecting it

    statistic: float
    expected: float
    p_value: float


def chi_square(first: Tensor, second: Tensor) -> Tensor:
    """Sum of (a - b)^2 / (a + b) over the cells of two count tables, each from the same number of images."""
    total = first + second
    return ((first - second).square() / total.clamp(min=1)).sum()


def marginal_counts(tokens_IN: Tensor, vocab: int) -> Tensor:
    """int64 `[I, N]`: the cell (position, token) of every token."""
    return tokens_IN + torch.arange(tokens_IN.shape[1]) * vocab


def neighbor_pair_counts(tokens_IN: Tensor, columns: int, classes_V: Tensor) -> Tensor:
    """int64 `[I, pairs]`: the cell (direction, class, class) of every horizontally or vertically adjacent pair of tokens.

    Args:
        classes_V: int64 `[V]`, a coarse class of each token; with single tokens nearly all pairs would occur once or never.
    """
    grid = classes_V[tokens_IN].view(len(tokens_IN), -1, columns)
    kinds = int(classes_V.max()) + 1
    across = grid[:, :, :-1] * kinds + grid[:, :, 1:]
    down = grid[:, :-1] * kinds + grid[:, 1:] + kinds * kinds
    return torch.cat([across.flatten(1), down.flatten(1)], dim=1)


def code_classes(codes_VC: Tensor, bits: int = 5) -> Tensor:
    """int64 `[V]`: a class for each token, by the signs of its code along the first principal components of the codebook."""
    centred = codes_VC - codes_VC.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    signs = (centred @ directions[:bits].t() > 0).long()
    return (signs * 2 ** torch.arange(signs.shape[1])).sum(1)


def features(tokens_IN: Tensor, columns: int, codes_VC: Tensor) -> Tensor:
    """float32 `[I, 5 C]`: mean code of each quarter, and the standard deviation of the codes over the image."""
    field = codes_VC[tokens_IN].view(len(tokens_IN), -1, columns, codes_VC.shape[1])
    rows = field.shape[1]
    top, left = rows // 2, columns // 2
    quarters = [field[:, a, b].mean((1, 2)) for a in (slice(top), slice(top, None)) for b in (slice(left), slice(left, None))]
    return torch.cat([*quarters, field.std((1, 2))], dim=1)


def permutation_test(
    statistic: Callable[[Tensor], Tensor], num_images: int, permutations: int = 200, seed: int = 0
) -> TestResult:
    """Permutation test that swaps the two images of a pair at random.

    Args:
        statistic: of a bool mask `[I]`, True where the two images of a pair are swapped.
        num_images: I, the number of images of each set.

    Raises:
        ValueError: `permutations` is below 1.
    """
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    generator = torch.Generator().manual_seed(seed)
    own = float(statistic(torch.zeros(num_images, dtype=torch.bool)))
    others = [float(statistic(torch.rand(num_images, generator=generator) < 0.5)) for _ in range(permutations)]
    reached = sum(other >= own for other in others)
    return TestResult(own, sum(others) / permutations, (1 + reached) / (1 + permutations))


def chi_square_test(first: Tensor, second: Tensor, cells: int, permutations: int, seed: int = 0) -> TestResult:
    """Test the chi-square statistic of cell counts; cells are `[I, K]` for each set."""

    def statistic(swap: Tensor) -> Tensor:
        a, b = torch.where(swap[:, None], second, first), torch.where(swap[:, None], first, second)
        return chi_square(*(torch.bincount(x.flatten(), minlength=cells).double() for x in (a, b)))

    return permutation_test(statistic, len(first), permutations, seed)


def mean_difference_test(first: Tensor, second: Tensor, permutations: int, seed: int = 0) -> TestResult:
    """Test the squared distance of the means of features `[I, F]`, each feature scaled by its standard deviation."""
    scale = torch.cat([first, second]).std(0).clamp(min=1e-6)
    difference = (first - second) / scale

    def statistic(swap: Tensor) -> Tensor:
        return torch.where(swap[:, None], -difference, difference).mean(0).square().sum() * len(first)

    return permutation_test(statistic, len(first), permutations, seed)


def two_sample_tests(
    first_IN: Tensor, second_IN: Tensor, codes_VC: Tensor, columns: int, permutations: int = 200
) -> dict[str, TestResult]:
    """Run all three tests. Image i of both sets must have the same prompt, and different seeds.

    Raises:
        ValueError: the sets differ in shape.
    """
    if first_IN.shape != second_IN.shape:
        raise ValueError(f"both sets must have one shape, got {tuple(first_IN.shape)} and {tuple(second_IN.shape)}")
    V, N = len(codes_VC), first_IN.shape[1]
    classes = code_classes(codes_VC)
    kinds = int(classes.max()) + 1

    def both(make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return make(first_IN), make(second_IN)

    pairs = both(lambda t: neighbor_pair_counts(t, columns, classes))
    return {
        "token marginals per position": chi_square_test(*both(lambda t: marginal_counts(t, V)), V * N, permutations),
        "neighboring tokens": chi_square_test(*pairs, 2 * kinds * kinds, permutations),
        "tokenizer features": mean_difference_test(*both(lambda t: features(t, columns, codes_VC)), permutations),
    }


def label_cache(folder: Path, settings: dict[str, Any]) -> None:
    """Label `folder` as holding tokens generated with `settings`.

    Raises:
        ValueError: it holds tokens of other settings; names what differs.
    """
    settings = json.loads(json.dumps(settings))
    folder.mkdir(parents=True, exist_ok=True)
    label = next(
        (file for file in (folder / "settings.json", folder / "made_of.json") if file.is_file()), None
    )  # new, old name
    if label is None:
        if any(folder.glob("*.npz")):
            raise ValueError(f"cache {str(folder)!r} holds tokens of unknown settings; give another one")
        with atomic_file(folder / "settings.json") as temporary:
            temporary.write_text(json.dumps(settings, indent=1))
        return
    cached = json.loads(label.read_text())
    changed = [key for key in settings if not same_spec(cached.get(key), settings[key])]
    if changed:
        listed = "; ".join(f"{key} {cached.get(key)!r} (now {settings.get(key)!r})" for key in changed)
        raise ValueError(f"cache {str(folder)!r} holds tokens of other settings: {listed[:400]}. Give another")


@contextmanager
def _reporting(path: Path, on_error: Callable[[Path, OSError], None] | None) -> Iterator[None]:
    """Pass an OSError to `on_error` instead of raising it, if there is one."""
    try:
        yield
    except OSError as error:
        if on_error is None:
            raise
        on_error(path, error)


def generate_tokens(
    pipe: VisualPipeline,
    prompts: Sequence[str],
    accelerator: Method,
    num_images: int,
    batch: int,
    seed: int,
    folder: Path,
    settings: dict[str, Any],
    weights: str,
    progress: Callable[[int], None] | None = None,
    on_cache_error: Callable[[Path, OSError], None] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Generate tokens int64 `[num_images, N]` for the prompts in turn; return mean statistics, too.

    Every batch is saved in `folder`, so an interrupted run resumes where it stopped. `weights` identifies the model.

    Args:
        seed: key of the first image's noise, not the seed of a generator as elsewhere; the next has `seed + 1`.
        on_cache_error: called if a file cannot be written, for example on a full disk; the run then continues without saving.

    Raises:
        ValueError: `folder` holds tokens of other weights, prompts, settings or another method, or damaged ones.
        OSError: a file cannot be written and `on_cache_error` is None.
    """
    decoder = open_decoder(pipe, settings)
    label = {
        "weights": weights,
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "prompts": list(prompts),
        "sampling": settings,
        "method": accelerator.spec(),
    }
    keep = False  # without the label, the origin of the tokens would be unknown
    with _reporting(folder, on_cache_error):
        label_cache(folder, label)
        keep = True
    parts, passes, relaxation = [], [], []
    for start in range(0, num_images, batch):
        file = folder / f"{seed}-{start}-{min(batch, num_images - start)}.npz"
        if file.is_file():
            saved = load_npz(file, "tokens", "tokens_per_pass", "relaxation")
            parts.append(torch.from_numpy(saved["tokens"].astype(np.int64)))
            passes.append(float(saved["tokens_per_pass"]))
            relaxation.append(float(saved["relaxation"]))
        else:
            numbers = range(start, min(start + batch, num_images))
            condition, count = pipe.encode_condition([prompts[i % len(prompts)] for i in numbers])
            result = decoder.decode(condition, torch.arange(seed + start, seed + start + count), accelerator)
            parts.append(result.tokens.cpu())
            passes.append(result.stats.tokens_per_pass)
            relaxation.append(float(np.mean(result.stats.relaxation)))
            if keep:
                tokens = parts[-1].numpy().astype(np.int32)
                with _reporting(file, on_cache_error), atomic_file(file) as temporary, temporary.open("wb") as stream:
                    np.savez(stream, tokens=tokens, tokens_per_pass=passes[-1], relaxation=relaxation[-1])
        if progress:
            progress(len(parts[-1]))
    return torch.cat(parts), {"tokens_per_pass": float(np.mean(passes)), "relaxation_per_image": float(np.mean(relaxation))}


def run_distribution_tests(
    pipe: VisualPipeline,
    prompts: Sequence[str],
    methods: dict[str, Method],
    num_images: int,
    batch: int,
    folder: Path,
    permutations: int = 200,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
    on_cache_error: Callable[[Path, OSError], None] | None = None,
) -> dict[str, Any]:
    """Test each method's images against baseline images with other seeds; of several scales, only the finest is tested.

    The baseline itself, with a third set of seeds, shows the test results when there is no difference.
    """
    sequential = resolve_method(pipe.baseline, pipe.paradigm)
    used = {**pipe.default_sampling, **(settings or {})}
    weights = weights_digest(pipe.transformer, pipe.draft_transformer)
    shared: tuple[Any, ...] = (used, weights, progress, on_cache_error)
    baseline, _ = generate_tokens(pipe, prompts, sequential, num_images, batch, 10**6, folder / pipe.baseline, *shared)
    codes, (rows, columns) = pipe.codebook.detach().float().cpu(), pipe.grid
    finest = rows * columns
    results = {}
    for number, (name, accelerator) in enumerate(methods.items(), 2):
        seed = number * 10**6
        place = folder / name
        tokens, statistics = generate_tokens(pipe, prompts, accelerator, num_images, batch, seed, place, *shared)
        tests = two_sample_tests(baseline[:, -finest:], tokens[:, -finest:], codes, columns, permutations)
        results[name] = {
            "kind": accelerator.kind,
            **statistics,
            "tests": {test: asdict(result) for test, result in tests.items()},
        }
    head = {"baseline": pipe.baseline, "num_images": num_images}
    return {**head, "permutations": permutations, "sampling": used, "methods": results}
