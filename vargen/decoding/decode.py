"""`decode`: a list of images by an engine, with a callback that sees and edits all of them; log-probabilities of their tokens.

Shape suffixes: M images, N tokens of the grid, T tokens fed in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.engine import Engine
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.methods import Accelerator
from vargen.decoding.requests import Callback, DecodeOutput, FinishedImage, Progress, validate_call
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.stats import DecodeStats
from vargen.decoding.tree import Tree
from vargen.values import require_int


def decode(
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: str | Accelerator = "ar",
    sampling: Sampling | None = None,
    *,
    callback: Callback | None = None,
    profile: bool = False,
    batch_size: int | None = None,
) -> DecodeOutput:
    """Generate the tokens of M images.

    Args:
        model: see `TokenModel`.
        condition: passed to `model.prefill`; M rows.
        seeds: int64 `[M]`. Image i depends only on `seeds[i]` and its condition, not on the rest of the batch.
        accelerator: the name of a preset, or an `Accelerator`.
        sampling: temperature and filters. Default: sample from the unfiltered softmax.
        callback: called after every pass with a `Progress` of all M images, and may change the tokens that it holds. Returning
            False stops the run. Its exceptions propagate.
        profile: see `Engine`.
        batch_size: maximum number of images at a time. If there are more, each finished image makes room for the next one.
            None: all at once.

    Returns:
        Tokens `[M, N]`, lengths `[M]` and `DecodeStats`.

    Raises:
        ValueError: if the accelerator is unknown or cannot run on this model, `top_k` exceeds the vocabulary, or `seeds` is
            empty.
        TypeError: if the accelerator, seeds, sampling or callback has the wrong type.
        NonFiniteLogitsError: if logits are not finite; names the pass and position of the first.
    """
    validate_call(seeds, Sampling() if sampling is None else sampling, callback)
    slots = len(seeds) if batch_size is None else min(require_int("batch_size", batch_size, 1), len(seeds))
    engine = Engine(model, accelerator, batch_size=slots, profile=profile)
    return generate_images(engine, condition, seeds, sampling, callback)


@torch.no_grad()
@without_autocast
def generate_images(
    engine: Engine, condition: Any, seeds: Tensor, sampling: Sampling | None, callback: Callback | None = None
) -> DecodeOutput:
    """Generate the tokens of M images by an engine that has no requests; arguments and errors as of `decode`.

    If a callback stops the run, the engine has no requests afterwards, either.
    """
    engine.submit(condition, seeds, sampling)
    M, N, finished = len(seeds), engine.num_tokens, dict[int, DecodeStats]()
    # Of finished images, and of the others as of when they were last read.
    tokens = torch.zeros(M, N, dtype=torch.int64, device=engine.device)
    length, stopped = torch.zeros(M, dtype=torch.int64), False

    def take(images: list[FinishedImage]) -> None:
        for image in images:
            if image.error is not None:
                raise image.error
            tokens[image.number], finished[image.number] = image.tokens, image.stats

    def read_tokens() -> Tensor:
        numbers, active, _ = engine.copy_active()
        tokens[numbers] = active
        return tokens

    def read_lengths() -> Tensor:
        counts = engine.list_counts()
        return torch.tensor([N if number in finished else sum(counts.get(number, ())) for number in range(M)])

    while engine.has_work and not stopped:
        take(engine.step())
        if callback is not None:
            before, length = length, read_lengths()
            progress = Progress(engine.passes, length, N, length - before, read_tokens)
            stopped = callback(progress) is False
            if "tokens" in vars(progress):  # the callback read them, and so may have changed them
                engine.replace_tokens(tokens)
    if stopped:
        take(engine.drain())
    known = engine.list_stats() | finished
    stats = engine.make_stats([known[number] for number in range(M)])
    stats.stopped = len(finished) < M
    output = DecodeOutput(read_tokens().clone(), read_lengths().to(engine.device), stats)
    for number in range(M):
        engine.cancel(number)
    return output


@torch.no_grad()
@without_autocast
def compute_log_probs(
    model: TokenModel, condition: Any, tokens: Tensor, sampling: Sampling | None = None, *, width: int = 64
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of tokens, as policy-gradient training needs them, in passes over `width` known tokens.

    They are those of the target, and so of every exact method.

    Args:
        model, condition: as in `decode`; M rows.
        tokens: int64 `[M, N]`.
        sampling: temperature and filters. Default: the unfiltered softmax.
        width: number of tokens per pass, at least 1.

    Returns:
        Two tensors float32 `[M, N]`: under the sampling distribution, after guidance, temperature and filters (-inf for a token
        that the filters remove), and under the softmax of the guided logits.
    """
    sampling = Sampling() if sampling is None else sampling
    N = model.grid[0] * model.grid[1]
    if tokens.dim() != 2 or tokens.shape[1] != N:
        raise ValueError(f"tokens must be [M, {N}], got {list(tokens.shape)}")
    width = max(1, min(width, N))
    state, out = model.start(condition, width)
    logits, device = [out.logits], tokens.device
    for start in range(0, N - 1, width):
        fed = tokens[:, start : min(start + width, N - 1)]
        T = fed.shape[1]
        chain = Tree.make_chain(T - 1, device)
        logits.append(model.forward(fed, state, chain).logits)
        model.commit(
            state, torch.arange(T, device=device).expand(len(fed), T), torch.full((len(fed),), T, device=device), chain
        )
    whole = torch.cat(logits, 1)
    sampled = to_probs(whole, sampling).log().gather(2, tokens[..., None])[..., 0]
    plain = whole.float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return sampled, plain
