"""Decode a list of images in a batch that is smaller than the list: a finished image makes room for the next one.

Shape suffixes: M images of the list, N tokens of the grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.decoding.harness import Callback, DecodeOutput, Progress, validate_call
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.accelerator import Accelerator
from vargen.decoding.next_token.engine import Engine, FinishedImage
from vargen.decoding.next_token.graphs import CUDAGraph
from vargen.decoding.sampling import Sampling


def decode_list(
    model: TokenModel,
    condition: Any,
    seeds: Tensor,
    accelerator: str | Accelerator = "ar",
    sampling: Sampling | None = None,
    *,
    batch_size: int,
    callback: Callback | None = None,
    profile: bool = False,
    graphs: type[CUDAGraph] | None = None,
) -> DecodeOutput:
    """Generate the tokens of M images, at most `batch_size` at a time; see `decode` and `Engine`.

    Args:
        callback: called after every pass with the progress of all M images; images that have not begun have length 0.

    Raises:
        ValueError, TypeError: as `decode`, and for a batch size below 1.
        NonFiniteLogitsError: if the logits of an image are not finite.
    """
    validate_call(seeds, Sampling() if sampling is None else sampling, callback)
    engine = Engine(model, accelerator, batch_size=batch_size, profile=profile, graphs=graphs)
    engine.submit(condition, seeds, sampling)
    device = torch.device(model.device)
    tokens = torch.zeros(len(seeds), engine.num_tokens, dtype=torch.int64, device=device)
    length = torch.zeros(len(seeds), dtype=torch.int64, device=device)
    images: list[FinishedImage] = []
    stopped = False
    while not stopped and (engine.num_waiting or engine.num_active):
        before = length.clone()
        for image in engine.step():
            if image.error is not None:
                raise image.error
            tokens[image.number], length[image.number] = image.tokens, engine.num_tokens
            images.append(image)
        if callback is not None:
            numbers, active, lengths = engine.copy_active()
            tokens[numbers], length[numbers] = active, lengths
            progress = Progress(engine.passes, tokens, length.clone(), engine.num_tokens, length - before)
            is_complete = len(images) == len(seeds)
            stopped = callback(progress) is False and not is_complete
            engine.replace_tokens(tokens)
    stats = engine.make_stats(sorted(images, key=lambda image: image.number))
    if stopped:  # also count the images that are not finished
        stats.images, stats.tokens, stats.stopped = len(seeds), int(length.sum()), True
        stats.seeds, stats.relaxation = seeds.tolist(), _scatter_relaxation(images, len(seeds))
    return DecodeOutput(tokens, length, stats, finished=not stopped)


def _scatter_relaxation(images: list[FinishedImage], count: int) -> list[float]:
    """Return the relaxation of all images of the list, 0 for those that did not finish."""
    known = {image.number: image.relaxation for image in images}
    return [known.get(number, 0.0) for number in range(count)]
