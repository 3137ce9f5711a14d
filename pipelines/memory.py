"""Memory that does not suffice: to draw all at once, which is then done in two halves, or to load a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vargen.decoding import DecodeOutput, DecodeStats

logger = logging.getLogger("vargen")
_ALLOCATORS = ("can't allocate memory", "not enough memory", "os error 12", "Cannot allocate memory")  # of torch, safetensors


@contextmanager
def loading_memory(folder: Path) -> Iterator[None]:
    """Let memory that runs out in the block, which loads a folder's weights, be an error that says how large they are.

    Raises:
        MemoryError: naming the folder and the bytes of its weight files.
    """
    try:
        yield
    except Exception as error:
        if not _ran_out(error):
            raise
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        raise MemoryError(
            f"memory does not suffice to load {folder}, whose weight files are {size:,} bytes; "
            "close other programs, or use a smaller model or dtype"
        ) from error


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory did, or what led to the error: diffusers says of any error that the file cannot be read."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in _ALLOCATORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def within_memory(run: Callable[[slice], DecodeOutput], images: int) -> DecodeOutput:
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
    parts: list[DecodeOutput] = []
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
    return DecodeOutput(
        tokens, length, DecodeStats.joined([part.stats for part in parts]), all(part.finished for part in parts)
    )
