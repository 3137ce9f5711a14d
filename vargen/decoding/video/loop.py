"""The block loop: draft a block if the policy says so, decode and score it; accept it, or let the target generate the block.

Models exchange latents, never keys and values. A rejected draft needs no undo: the caches hold only finished blocks, and the
decoder state is immutable, so continuing from the previous state discards the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.clock import Clock
from vargen.decoding.costs import block_threads
from vargen.decoding.presets import resolve_method
from vargen.decoding.video.denoising import BlockContext, BlockGenerator, make_block_noise
from vargen.decoding.video.interfaces import (
    BlockCallback,
    BlockDecoder,
    BlockModel,
    BlockProgress,
    BlockScorer,
    BlockView,
    DraftRouter,
    DraftView,
    VideoBlock,
)
from vargen.decoding.video.policies import PolicyState, SingleModel, VideoDecisions, VideoMethod, validate_threshold
from vargen.decoding.video.stats import BlockRecord, VideoStats
from vargen.device import limit_threads, normal_tensors
from vargen.values import parse_int, short_repr

MAX_BLOCKS = 1_000_000


class StopRequested(Exception):
    """A callback or `cancel` ends the run."""


class NonFiniteLatentsError(RuntimeError):
    """A model returned NaN or infinite latents; no frame is returned."""


@dataclass(frozen=True)
class VideoRequest:
    """The validated arguments of `decode_video`."""

    model: BlockModel
    condition: Any
    seed: int
    method: VideoMethod
    blocks: int
    decoder: BlockDecoder
    preview: BlockDecoder | None
    score: BlockScorer | None
    given: Sequence[Tensor]
    callback: BlockCallback | None
    profile: bool
    router: DraftRouter | None = None

    def __post_init__(self) -> None:
        if parse_int(self.blocks, 1, MAX_BLOCKS) is None:
            raise ValueError(f"blocks must be a whole number from 1 to {MAX_BLOCKS}, got {short_repr(self.blocks)}")
        if parse_int(self.seed, -(2**63), 2**63 - 1) is None:
            raise ValueError(f"seed must be a whole number of 64 bits, got {short_repr(self.seed)}")
        for name, function in (("callback", self.callback), ("score", self.score), ("router", self.router)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {short_repr(function)}")
        for latents in self.given:
            shape = list(latents.shape) if isinstance(latents, Tensor) else None
            if shape is None or len(shape) != 5 or shape[2:] != list(self.model.block_shape[1:]):
                got = short_repr(latents) if shape is None else shape
                raise ValueError(f"given must be latents [1, F, *{list(self.model.block_shape[1:])}], got {got}")
        self.method.validate_models(self.model, self.score is not None, self.router is not None)


class BlockFrames(NamedTuple):
    frames: Tensor  # float32 [T, 3, Y, X] in [0, 1]
    state: Any


class BlockDecoderState:
    """The decoder of one video: its state, and the last frame of the last accepted block."""

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last_frame: Tensor | None = None
        self._latest: tuple[Tensor, BlockFrames] | None = None

    def decode(self, latents: Tensor) -> BlockFrames:
        """Decode the next block.

        The result is cached, so that a block decoded for scoring is not decoded again when it is accepted.
        """
        if self._latest is None or self._latest[0] is not latents:
            self.discard()
            pixels, state = self.decoder.decode_block(latents, self.state)
            self._latest = latents, BlockFrames((pixels[0].float() / 2 + 0.5).clamp(0, 1), state)
        return self._latest[1]

    def discard(self) -> None:
        """Free the result for a block that was not accepted."""
        self._latest = None

    def accept(self, latents: Tensor) -> Tensor:
        """Advance past the block and return its frames."""
        frames, self.state = self.decode(latents)
        self.last_frame, self._latest = frames[-1].clone(), None
        return frames


class ScoreResult(NamedTuple):
    """Result of scoring a block.

    Attributes:
        score: finite; None if scoring failed.
        frame_scores: output of the scorer.
        failure: error message, if scoring failed.
    """

    score: float | None
    frame_scores: list[float]
    failure: str | None = None


def score_block(scorer: BlockScorer, view: BlockView) -> ScoreResult:
    """Score a block by its worst frame, because a single broken one is visible (SDVG, arXiv:2604.17397).

    Exceptions of the scorer and non-finite scores are reported in the result, not raised.
    """
    try:
        scores = torch.as_tensor(scorer(view)).detach().float().reshape(-1).cpu()
        if not scores.numel() or not scores.isfinite().all():
            return ScoreResult(None, [], f"the scorer returned {short_repr(scores.tolist())}, not finite numbers")
    except Exception as error:  # user code: the target generates this block, and its record reports the error
        return ScoreResult(None, [], f"the scorer raised {type(error).__name__}: {error}")
    return ScoreResult(float(scores.min()), scores.tolist())


class DraftVerifier:
    """Decides which drafts are accepted, and decodes.

    Args:
        policy: its state in the video.
        decoder: of the returned frames. preview: of scored ones; None to score the returned ones.
        score, router: see `decode_video`.

    Attributes:
        full, preview: states of the two decoders; `preview` is None if nothing is decoded with it.
        score: of the current prompt.
    """

    def __init__(
        self,
        method: VideoMethod,
        policy: PolicyState,
        decoder: BlockDecoder,
        preview: BlockDecoder | None = None,
        score: BlockScorer | None = None,
        router: DraftRouter | None = None,
    ):
        self.method, self.policy, self.score, self.router = method, policy, score, router
        self.full = BlockDecoderState(decoder)
        self.preview = None if preview is None or not method.policy.needs_scores else BlockDecoderState(preview)

    def verify(self, record: BlockRecord, draft: Tensor, finished: tuple[Tensor, Tensor] | None, clock: Clock) -> bool:
        """Return whether a draft is accepted, and record the outcome.

        Args:
            finished: latents of the first and the latest finished block; None at the start of a video.
        """
        record.tau = self.policy.tau
        if not isinstance(self.method.policy, SingleModel) and not bool(draft.isfinite().all()):
            record.failure, accepted = "the drafter's latents are not finite", False
        else:
            if self.method.policy.needs_scores:
                record.score, record.scores, record.failure = self.score_latents(record.number, draft, clock)
            elif self.method.policy.needs_router:
                record.score = self._rank(record.number, draft, finished, clock)
            failed = self.method.policy.needs_scores and record.score is None
            accepted = not failed and self.policy.should_accept(record.number, record.score)
        record.outcome = "accepted" if accepted else "rejected"
        return accepted

    def _rank(self, number: int, draft: Tensor, finished: tuple[Tensor, Tensor] | None, clock: Clock) -> float:
        """Return 1 minus the router's rank of a draft; 0 at the start of a video, which routers do not know."""
        if finished is None:
            return 0.0
        assert self.router is not None
        first, previous = finished
        with clock.measure("score"):
            return 1 - self.router(DraftView(number, draft, previous, first))

    def score_latents(self, number: int, latents: Tensor, clock: Clock) -> ScoreResult:
        """Decode and score a block."""
        assert self.score is not None
        decoder = self.preview or self.full
        with clock.measure("decode"):
            frames = decoder.decode(latents).frames
        with clock.measure("score"):
            view = BlockView(number, latents[0], frames, decoder.last_frame)
            return score_block(self.score, view)

    def accept(self, latents: Tensor) -> Tensor:
        """Advance the decoders past a block and return its frames."""
        if self.preview is not None:
            self.preview.accept(latents)
        return self.full.accept(latents)

    def discard(self) -> None:
        """Free the decoded frames of a block that was not accepted."""
        for decoder in (self.full, self.preview):
            if decoder is not None:
                decoder.discard()


class BlockStream(Iterator[VideoBlock]):
    """Iterator over the blocks of a video during generation; see `decode_video`.

    Attributes:
        stats: one record for each finished block.
        target, drafter: the generators of the two models; None after the end of the video, and if the method has no drafter.
    """

    def __init__(self, request: VideoRequest):
        self.request, self.method, self.blocks = request, request.method, int(request.blocks)
        self.stats = VideoStats(self.method.name, int(request.seed), threads=torch.get_num_threads())
        self.target: BlockGenerator | None = None
        self.drafter: BlockGenerator | None = None
        self._condition = request.condition
        self._decisions = VideoDecisions(self.method, int(request.seed))
        self._verifier = DraftVerifier(
            self.method, self._decisions.policy, request.decoder, request.preview, request.score, request.router
        )
        self._number = 0
        self._cancelled = False
        self._finished: tuple[Tensor, Tensor] | None = None  # latents of the first and the latest finished block
        self._given: list[tuple[Tensor, Tensor]] = []  # given latents and their frames, which the first block contains
        self._threads: int | None = None  # number of CPU threads, selected by measurement

    # -- control during generation -------------------------------------------------------------------------------------------

    @property
    def tau(self) -> float | None:
        """The current threshold, None if the method has none. A new value applies from the next decision on."""
        return self._decisions.policy.tau

    @tau.setter
    def tau(self, value: float) -> None:
        if self.tau is None:
            raise ValueError(f"tau cannot be set: accelerator {self.method.name!r} compares no score with a threshold")
        self._decisions.policy.tau = validate_threshold(value)

    def change_prompt(self, condition: Any, score: BlockScorer | None = None) -> None:
        """Use another prompt from the next block on; finished blocks are unchanged. `score` must be for the new prompt.

        Raises:
            ValueError: if the method scores drafts, and no `score` is given.
        """
        if score is None and self._verifier.score is not None:
            raise ValueError("score must be given with a new prompt: the old one scores the old prompt")
        self._condition, self._verifier.score = condition, score
        with torch.no_grad():
            for generator in self._by_context():
                generator.change_prompt(condition)

    def cancel(self) -> None:
        """End the run within one pass; the current block is discarded."""
        self._cancelled = True

    def close(self) -> None:
        """Free the caches; no further block is generated."""
        self.target = self.drafter = None
        self._verifier.full.state = None
        self._number = self.blocks

    # -- generation ----------------------------------------------------------------------------------------------------------

    def __next__(self) -> VideoBlock:
        if self._number >= self.blocks:
            self.close()
            raise StopIteration
        try:
            if self._cancelled:
                raise StopRequested
            with torch.no_grad(), normal_tensors():
                return self._advance()
        except StopRequested:
            self.stats.stopped = True
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    @without_autocast
    def _advance(self) -> VideoBlock:
        if self.target is None:
            self._threads = block_threads(self.request.model, self._condition)
        with nullcontext() if self._threads is None else limit_threads(self._threads):
            self.stats.threads = torch.get_num_threads()
            return self._make_block()

    def _make_block(self) -> VideoBlock:
        self._clock = Clock(self.request.model.device, self.request.profile)
        passes = self._count_passes()
        if self.target is None:
            self._start()
        record = BlockRecord(self._number, self.stats.seed)
        latents, frames = self._generate(record)
        self._add_finished(latents, last=self._number + 1 == self.blocks)
        record.seconds = self._clock.read() - self._clock.started
        record.seconds_by_part = {name: seconds for name, seconds in self._clock.parts.items() if seconds > 0}
        record.passes = {name: count - passes.get(name, 0) for name, count in self._count_passes().items()}
        self._decisions.observe(record)
        self.stats.blocks.append(record)
        self.stats.seconds += record.seconds
        self._number += 1
        parts, self._given = [*self._given, (latents, frames)], []
        latents, frames = torch.cat([part for part, _ in parts], 1), torch.cat([part for _, part in parts])
        return VideoBlock(record.number, latents[0], frames, record)

    def _start(self) -> None:
        model, given = self.request.model, self.request.given
        frames = self.blocks * model.block_shape[0] + sum(latents.shape[1] for latents in given)
        context = BlockContext(model, self._condition, frames, self.method.lazy)
        self.target = BlockGenerator(model, context, self._after_pass)
        if self.method.needs_draft_model and model.draft_model is not None:
            shared = context if model.shares_cache else BlockContext(model.draft_model, self._condition, frames)
            self.drafter = BlockGenerator(model.draft_model, shared, self._after_pass)
        for latents in (each.to(model.device, torch.float32) for each in given):
            self._add_finished(latents, last=False)
            self._given.append((latents, self._verifier.accept(latents)))

    def _generate(self, record: BlockRecord) -> tuple[Tensor, Tensor]:
        """Run the algorithm for one block: latents `[1, F, C, Y, X]` and frames `[F', 3, Y, X]`."""
        draft = None
        if self._should_draft(record):
            exit_step = self.method.exit_step
            draft = self._denoise("target", last=exit_step) if exit_step else self._denoise("draft")
            if self._verifier.verify(record, draft, self._finished, self._clock):
                record.source = "draft"
                return draft, self._accept(draft, record)
            self._verifier.discard()
        latents = self._resume() if draft is not None and self.method.exit_step else self._denoise("target")
        return latents, self._accept(latents, record)

    def _should_draft(self, record: BlockRecord) -> bool:
        missing = self.drafter is None and not self.method.exit_step
        reason = "undrafted" if missing else self._decisions.reason_not_to_draft(record.number)
        if reason is not None:
            record.outcome = reason
        return reason is None

    def _denoise(self, name: str, last: int | None = None) -> Tensor:
        generator = self._generators()[name]
        with self._clock.measure("commit"):
            generator.update_cache()
        with self._clock.measure(name):
            return generator.generate(self._noise(), last)

    def _resume(self) -> Tensor:
        assert self.target is not None
        with self._clock.measure("target"):
            return self.target.resume(self._noise())

    def _noise(self) -> Callable[[int], Tensor]:
        model = self.request.model
        return partial(make_block_noise, int(self.request.seed), self._number, shape=model.block_shape, device=model.device)

    def _accept(self, latents: Tensor, record: BlockRecord) -> Tensor:
        """Advance the decoders past the block and return its frames."""
        if not bool(latents.isfinite().all()):
            model = "drafter" if record.source == "draft" and not self.method.exit_step else "target"
            raise NonFiniteLatentsError(
                f"the {model} generated NaN or infinite latents in block {record.number} of {self.blocks}; no frame is decoded "
                "from them. Check the checkpoint, or run with torch_dtype=torch.float32"
            )
        with self._clock.measure("decode"):
            return self._verifier.accept(latents)

    def _add_finished(self, latents: Tensor, last: bool) -> None:
        """Pass a finished block to both models; each decides when to update its cache."""
        self._finished = (latents if self._finished is None else self._finished[0], latents)
        with self._clock.measure("commit"):
            for generator in self._by_context():
                generator.add_finished(latents, last)

    def _generators(self) -> dict[str, BlockGenerator]:
        named = (("target", self.target), ("draft", self.drafter))
        return {name: generator for name, generator in named if generator is not None}

    def _by_context(self) -> list[BlockGenerator]:
        """One generator for each context."""
        return list({id(generator.context): generator for generator in self._generators().values()}.values())

    def _count_passes(self) -> dict[str, int]:
        return {name: generator.passes for name, generator in self._generators().items()}

    def _after_pass(self) -> None:
        with normal_tensors():
            progress = BlockProgress(self._number, self.blocks, sum(self._count_passes().values()))
            if self.request.callback is not None and self.request.callback(progress) is False:
                self._cancelled = True
        if self._cancelled:
            raise StopRequested


def decode_video(
    model: BlockModel,
    condition: Any,
    seed: int,
    method: str | VideoMethod = "target",
    *,
    blocks: int,
    decoder: BlockDecoder,
    preview: BlockDecoder | None = None,
    score: BlockScorer | None = None,
    given: Sequence[Tensor] = (),
    callback: BlockCallback | None = None,
    profile: bool = False,
    router: DraftRouter | None = None,
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
        given: latents `[1, F', C, Y, X]` that the video starts with, such as those of an image; the first block contains them.
        callback: called after every pass; returning False ends the run before the block is finished.
        profile: on CUDA, synchronize between the parts of a step to measure their seconds.
        router: ranks drafts, for methods with a `LearnedRouting`.

    Raises:
        ValueError: if the method is unknown or cannot run on these models, or a number is out of range.
        TypeError: if an argument has the wrong type.
        NonFiniteLatentsError: during iteration, if latents of the target are not finite, or of a draft of `SingleModel`.
    """
    if isinstance(model, type) or not isinstance(model, BlockModel):
        raise TypeError(f"model must be a BlockModel, got {short_repr(model)}")
    chosen = resolve_method(method, VideoMethod.paradigm)
    request = VideoRequest(model, condition, seed, chosen, blocks, decoder, preview, score, given, callback, profile, router)
    return BlockStream(request)
