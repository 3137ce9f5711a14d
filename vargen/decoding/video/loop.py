"""The block loop: draft a block if the policy says so, decode and score it; accept it, or let the target generate the block.

Models exchange latents, never keys and values. A rejected draft needs no undo: the caches hold only finished blocks, and the
decoder state is immutable, so continuing from the previous state discards the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.harness import Clock
from vargen.decoding.pass_costs import block_threads
from vargen.decoding.presets import resolve_method
from vargen.decoding.video.denoising import BlockGenerator, Lazy, make_block_noise
from vargen.decoding.video.method import VideoMethod
from vargen.decoding.video.policies import Router, SingleModel, validate_threshold
from vargen.decoding.video.protocols import BlockModel
from vargen.decoding.video.scoring import BlockDecoder, BlockPixels, Score, Scored, View, scored
from vargen.decoding.video.stats import BlockRecord, VideoStats
from vargen.device import limit_threads, normal_tensors
from vargen.values import parse_int, short_repr


class NonFiniteLatentsError(RuntimeError):
    """A model returned NaN or infinite latents; no frame is returned."""


class Progress(NamedTuple):
    """State passed to a callback after every pass: the current block, the number of blocks, and the total number of passes."""

    block: int
    blocks: int
    passes: int


Callback = Callable[[Progress], bool | None]


@dataclass(frozen=True)
class Block:
    """A finished block.

    Attributes:
        number: from 0.
        latents: float32 `[F, C, Y, X]`.
        frames: float32 `[F', 3, Y, X]` in [0, 1].
        row: record of how it was generated.
    """

    number: int
    latents: Tensor
    frames: Tensor
    row: BlockRecord

    def __repr__(self) -> str:
        latents, frames = list(self.latents.shape), list(self.frames.shape)
        return f"Block(number={self.number}, maker={self.row.maker!r}, latents={latents}, frames={frames})"


class _Stopped(Exception):
    """A callback or `cancel` ends the run."""


class BlockStream(Iterator[Block]):
    """Iterator over the blocks of a video during generation; see `decode_video`.

    Attributes:
        stats: one record for each finished block.
        target, drafter: the generators of the two models; None after the end of the video, and if the method has no drafter.
    """

    def __init__(
        self,
        model: BlockModel,
        condition: Any,
        seed: int,
        routing: VideoMethod,
        blocks: int,
        decoder: BlockDecoder,
        preview: BlockDecoder | None,
        score: Score | None,
        given: Sequence[Tensor],
        callback: Callback | None,
        profile: bool,
    ):
        self.model, self.seed, self.routing, self.blocks = model, seed, routing, blocks
        self.score, self.callback = score, callback
        self.stats = VideoStats(routing.name, seed, threads=torch.get_num_threads())
        self.router: Router = routing.policy.start(seed)
        self._full = BlockPixels(decoder)
        self._cheap = BlockPixels(preview) if preview is not None and routing.policy.scored else None
        self._clock = Clock(model.device, profile)
        self._condition, self._given = condition, given
        self._number = self._run = self._rejected = self._off = 0
        self._cancelled = False
        self._threads: int | None = None  # number of CPU threads, selected by measurement
        self.target: BlockGenerator | None = None
        self.drafter: BlockGenerator | None = None

    # -- control during generation -------------------------------------------------------------------------------------------

    @property
    def tau(self) -> float | None:
        """The current threshold, None if the method has none. A new value applies from the next decision on."""
        return self.router.tau

    @tau.setter
    def tau(self, value: float) -> None:
        if self.router.tau is None:
            raise ValueError(f"tau cannot be set: accelerator {self.routing.name!r} compares no score with a threshold")
        self.router.tau = validate_threshold(value)

    def switch(self, condition: Any, score: Score | None = None) -> None:
        """Switch to another prompt from the next block on; finished blocks are unchanged. `score` must be for the new prompt.

        Raises:
            ValueError: if the method scores drafts, and no `score` is given.
        """
        if score is None and self.score is not None:
            raise ValueError("score must be given with a new prompt: the old one scores the old prompt")
        self._condition, self.score = condition, score
        with torch.no_grad():
            for _, follower in self._followers():
                follower.switch(condition)

    def cancel(self) -> None:
        """End the run within one pass; the current block is discarded."""
        self._cancelled = True

    def close(self) -> None:
        """Free the caches; no further block is generated."""
        self.target = self.drafter = None
        self._full.state = None
        self._number = self.blocks

    # -- generation ----------------------------------------------------------------------------------------------------------

    def __next__(self) -> Block:
        if self._number >= self.blocks:
            self.close()
            raise StopIteration
        try:
            if self._cancelled:
                raise _Stopped
            with torch.no_grad(), normal_tensors():
                return self._next()
        except _Stopped:
            self.stats.stopped = True
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    @without_autocast
    def _next(self) -> Block:
        if self.target is None:
            self._threads = block_threads(self.model, self._condition)
        with nullcontext() if self._threads is None else limit_threads(self._threads):
            self.stats.threads = torch.get_num_threads()
            return self._block()

    def _block(self) -> Block:
        started, before = self._clock.now(), dict(self._clock.parts)
        passes, fed = self._passes(), self._fed()
        if self.target is None:
            self._start()
        row = BlockRecord(self._number, self.stats.seed)
        latents, frames = self._made(row)
        self._see(latents, last=self._number + 1 == self.blocks)
        row.seconds = self._clock.now() - started
        row.seconds_by_part = {k: v - before.get(k, 0.0) for k, v in self._clock.parts.items() if v > before.get(k, 0.0)}
        row.passes = {name: count - passes.get(name, 0) for name, count in self._passes().items()}
        row.fed = {name: count - fed.get(name, 0) for name, count in self._fed().items()}
        self.router.observe(row)
        self._count(row)
        self.stats.blocks.append(row)
        self.stats.seconds += row.seconds
        self._number += 1
        return Block(row.number, latents[0], frames, row)

    def _start(self) -> None:
        frames = self.blocks * self.model.block_shape[0] + sum(latents.shape[1] for latents in self._given)
        rest = (frames, self.routing.fused, self._on_pass)
        self.target = BlockGenerator(self.model, self._condition, self.routing.commit, *rest)
        if self.routing.drafts and self.model.draft_model is not None:
            self.drafter = BlockGenerator(self.model.draft_model, self._condition, Lazy(), *rest)
        for latents in (each.to(self.model.device, torch.float32) for each in self._given):
            self._see(latents, last=False)
            self._full.keep(latents)
            if self._cheap is not None:
                self._cheap.keep(latents)

    def _made(self, row: BlockRecord) -> tuple[Tensor, Tensor]:
        """Run the algorithm for one block: latents `[1, F, C, Y, X]` and frames `[F', 3, Y, X]`."""
        draft = None
        if self._drafting(row):
            draft = self._draw("draft")
            if self._accepted(row, draft):
                row.maker = "draft"
                return draft, self._kept(draft, row)
        first = self._refined_from(row, draft)
        latents = self._draw("target", first, draft if first else None)
        row.maker = "refined" if first else "target"
        if row.number == 0 and self.routing.policy.reference:
            row.score, row.scores, row.note = self._scored(latents, row.number)
        return latents, self._kept(latents, row)

    def _drafting(self, row: BlockRecord) -> bool:
        """Return whether the block is drafted; if not, set the reason in `row`."""
        routing = self.routing
        if self.drafter is None or row.number in routing.forced:
            row.verdict = "forced" if self.drafter is not None else "undrafted"
        elif routing.longest_run is not None and self._run >= routing.longest_run:
            row.verdict = "forced"
        elif self._off or not self.router.drafts(row.number):
            row.verdict = "undrafted"
        else:
            return True
        return False

    def _draw(self, who: str, first: int = 0, draft: Tensor | None = None) -> Tensor:
        follower = self.target if who == "target" else self.drafter
        assert follower is not None
        shape, device = follower.model.block_shape, follower.model.device
        if not self.routing.fused:
            with self._part("commit"):
                follower.prepare()
        with self._part(who):
            return follower.draw(lambda step: make_block_noise(self.seed, self._number, step, shape, device), first, draft)

    def _accepted(self, row: BlockRecord, draft: Tensor) -> bool:
        """Verify a draft and record the verdict in `row`."""
        row.tau = self.router.tau
        if not isinstance(self.routing.policy, SingleModel) and not bool(draft.isfinite().all()):
            row.note, stands = "the drafter's latents are not finite", False
        elif self.routing.policy.scored:
            row.score, row.scores, row.note = self._scored(draft, row.number)
            stands = row.score is not None and self.router.accepts(row.number, row.score)
        else:
            stands = self.router.accepts(row.number, None)
        row.verdict = "accepted" if stands else "rejected"
        return stands

    def _scored(self, latents: Tensor, number: int) -> Scored:
        assert self.score is not None
        pixels = self._cheap or self._full
        with self._part("decode"):
            frames = pixels.decoded(latents).frames
        with self._part("score"):
            return scored(self.score, self.routing.aggregate, View(number, latents[0], frames, pixels.last))

    def _refined_from(self, row: BlockRecord, draft: Tensor | None) -> int:
        """Return the step at which the target starts; 0 generates the block from noise."""
        margin = self.routing.refine_margin
        if draft is None or not bool(draft.isfinite().all()):
            return 0
        if margin is not None and (row.score is None or row.tau is None or row.score < row.tau - margin):
            return 0
        return self.routing.refine

    def _kept(self, latents: Tensor, row: BlockRecord) -> Tensor:
        """Keep a block and return its frames."""
        if not bool(latents.isfinite().all()):
            who = "drafter" if row.maker == "draft" else "target"
            raise NonFiniteLatentsError(
                f"the {who} drew NaN or infinite latents in block {row.number} of {self.blocks}; nothing is made of them. "
                "Check the checkpoint, or run with torch_dtype=torch.float32"
            )
        with self._part("decode"):
            if self._cheap is not None:
                self._cheap.keep(latents)
            return self._full.keep(latents)

    def _see(self, latents: Tensor, last: bool) -> None:
        """Pass a finished block to both models; each decides when to update its cache."""
        with self._part("commit"):
            for _, follower in self._followers():
                follower.see(latents, last)

    def _count(self, row: BlockRecord) -> None:
        """Count consecutive accepted drafts and consecutive rejections."""
        self._run = self._run + 1 if row.verdict == "accepted" else 0
        self._off = max(0, self._off - 1) if row.verdict == "undrafted" else self._off
        if row.verdict in ("accepted", "rejected"):
            self._rejected = self._rejected + 1 if row.verdict == "rejected" else 0
            if self.routing.off_after is not None and self._rejected >= self.routing.off_after:
                self._off, self._rejected = self.routing.off_blocks, self.routing.off_after - 1  # the next pauses again

    def _followers(self) -> list[tuple[str, BlockGenerator]]:
        named = (("target", self.target), ("draft", self.drafter))
        return [(name, follower) for name, follower in named if follower is not None]

    def _passes(self) -> dict[str, int]:
        return {name: follower.passes for name, follower in self._followers()}

    def _fed(self) -> dict[str, int]:
        return {name: follower.fed for name, follower in self._followers()}

    def _part(self, name: str) -> Any:
        return self._clock.part(name)

    def _on_pass(self) -> None:
        with normal_tensors():
            made = Progress(self._number, self.blocks, sum(self._passes().values()))
            if self.callback is not None and self.callback(made) is False:
                self._cancelled = True
        if self._cancelled:
            raise _Stopped


MAX_BLOCKS = 1_000_000


def decode_video(
    model: BlockModel,
    condition: Any,
    seed: int,
    method: str | VideoMethod = "target",
    *,
    blocks: int,
    decoder: BlockDecoder,
    preview: BlockDecoder | None = None,
    score: Score | None = None,
    given: Sequence[Tensor] = (),
    callback: Callback | None = None,
    profile: bool = False,
) -> BlockStream:
    """Generate a video of `blocks` blocks, one at a time, as the result is iterated.

    Args:
        model: the target, with the small model as its `draft_model`.
        condition: passed to `start` of both models.
        seed: seed of all noise. The noise of a block depends only on seed, block and step, so no decision changes the noise of
            later blocks.
        method: the name of a preset, or a `VideoMethod`.
        decoder: decodes the returned frames.
        preview: a cheaper decoder for the frames that are scored.
        score: scores drafts, for methods that need it. An exception or a non-finite score rejects the draft.
        given: latents `[1, F', C, Y, X]` that the video starts with, such as those of an image; they are not yielded.
        callback: called after every pass; returning False ends the run before the block is finished.
        profile: on CUDA, synchronize between the parts of a step to measure their seconds.

    Raises:
        ValueError: if the method is unknown or cannot run on these models, or a number is out of range.
        TypeError: if an argument has the wrong type.
        NonFiniteLatentsError: during iteration, if latents of the target are not finite, or of a draft in the method `draft`.
    """
    if isinstance(model, type) or not isinstance(model, BlockModel):
        raise TypeError(f"model must be a BlockModel, got {short_repr(model)}")
    routing = resolve_method(method, VideoMethod.paradigm)
    if parse_int(blocks, 1, MAX_BLOCKS) is None:
        raise ValueError(f"blocks must be a whole number from 1 to {MAX_BLOCKS}, got {short_repr(blocks)}")
    if parse_int(seed, -(2**63), 2**63 - 1) is None:
        raise ValueError(f"seed must be a whole number of 64 bits, got {short_repr(seed)}")
    for name, function in (("callback", callback), ("score", score)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function or None, got {short_repr(function)}")
    for latents in given:
        if not isinstance(latents, Tensor) or latents.ndim != 5 or latents.shape[2:] != torch.Size(model.block_shape[1:]):
            raise ValueError(f"given must be latents [1, F, *{list(model.block_shape[1:])}], got {_shape(latents)}")
    routing.check(model, score is not None)
    return BlockStream(model, condition, int(seed), routing, int(blocks), decoder, preview, score, given, callback, profile)


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else short_repr(value)
