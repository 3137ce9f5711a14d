"""Drawing in two halves what does not fit at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from vargen.decoding import Decoded, DecodeStats

logger = logging.getLogger("vargen")


def within_memory(run: Callable[[slice], Decoded], images: int) -> Decoded:
    """All images at once, or, if memory does not suffice, half of them after the other half.

    Raises:
        torch.OutOfMemoryError: if half does not fit either.
    """
    try:
        return run(slice(0, images))
    except torch.OutOfMemoryError as error:
        if images == 1:
            raise torch.OutOfMemoryError("out of memory with one image; use a smaller model or dtype") from error
    # Outside the handler: the error's traceback would keep the first try's tensors alive.
    logger.warning("out of memory with %d images at once: drawing them in two halves", images)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = images // 2
    parts: list[Decoded] = []
    for chosen in (slice(0, half), slice(half, images)):
        try:
            parts.append(run(chosen))
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"out of memory with {images} images at once, and with {half}; make fewer per call (num_images_per_prompt, "
                "prompts)"
            ) from error
        if parts[-1].stats.stopped:
            break
    tokens, length = torch.cat([part.tokens for part in parts]), torch.cat([part.length for part in parts])
    missing = images - len(tokens)  # a callback stopped the first half
    tokens, length = (torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in (tokens, length))
    return Decoded(tokens, length, DecodeStats.joined([part.stats for part in parts]), all(part.finished for part in parts))
