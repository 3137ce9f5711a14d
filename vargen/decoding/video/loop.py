"""The block loop: draft a block if the policy says so, verify the draft; accept it, or let the target generate the block.

Models exchange latents, never keys and values. A rejected draft needs no undo: the caches hold only finished blocks, and the
states of decoders are immutable, so continuing from the previous state discards the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.costs import block_threads
from vargen.decoding.methods import resolve_method
from vargen.decoding.video.denoising import BlockGenerator, make_block_noise
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
from vargen.decoding.video.policies import SingleModel, VideoMethod, validate_threshold
from vargen.decoding.video.stats import BlockRecord, VideoStats
from vargen.device import limit_threads
from vargen.kernels.host import Clock, normal_tensors
from vargen.values import require_int, short_repr

MAX_BLOCKS = 1_000_000


class StopRequested(Exception):
    """A callback or `cancel` ends the run."""


class NonFiniteLatentsError(RuntimeError):
    """A model returned NaN or infinite latents; no frame is returned."""


class FrameDecoder:
    """A decoder in one video.

    Attributes:
        state: of the decoder, after the accepted blocks.
        last_frame: of the last accepted block, `[3, Y, X]`.
        latest: latents of the block decoded last, its frames, and the state after it, so that accepting it decodes nothing.
    """

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last_frame: Tensor | None = None
        self.latest: tuple[Tensor, Tensor, Any] | None = None

    def decode(self, latents: Tensor) -> tuple[Tensor, Any]:
        """Return the frames of the next block, float32 `[T, 3, Y, X]` in [0, 1], and the state after it."""
        if self.latest is None or self.latest[0] is not latents:
            pixels, state = self.decoder.decode_block(latents, self.state)
            self.latest = latents, (pixels[0].float() / 2 + 0.5).clamp(0, 1), state
        return self.latest[1:]

    def accept(self, latents: Tensor) -> Tensor:
        """Advance past the block and return its frames."""
        frames, self.state = self.decode(latents)
        self.last_frame, self.latest = frames[-1].clone(), None
        return frames


@dataclass(eq=False, repr=False)
class BlockStream(Iterator[VideoBlock]):
    """A video of `blocks` blocks, which are generated one at a time as it is iterated.

    Args:
        model: the target, with the small model as its `draft_model`.
        condition: passed to `start` of both models.
        seed: seed of all noise. The noise of a block depends only on seed, block and step, so no decision changes the noise of
            later blocks; a model with a `generator_class` may use other noise.
        method: the name of a preset, or a `VideoMethod`.
        decoder: decodes the returned frames.
        preview: a cheaper decoder for the frames that are scored.
        score: scores drafts, for methods that need it. An exception or a non-finite score rejects the draft.
        given: latents `[1, F', C, Y, X]` that the video starts with, such as those of an image; the first block contains them.
        callback: called after every pass; returning False ends the run before the block is finished.
        profile: on CUDA, synchronize between the parts of a step to measure their seconds.
        router: ranks drafts, for methods with a `LearnedRouting`.

    Attributes:
        stats: one record for each finished block.
        generators: of the models in use, `target` and `draft`; empty before the first block and after the end of the video.

    Raises:
        ValueError: if the method is unknown or cannot run on these models, or a number is out of range.
        TypeError: if the method or the scorer has the wrong type.
        NonFiniteLatentsError: during iteration, if latents of the target are not finite, or of a draft of `SingleModel`.
    """

    model: BlockModel
    condition: Any
    seed: int
    method: Any = "target"
    _: KW_ONLY
    blocks: int
    decoder: BlockDecoder
    preview: BlockDecoder | None = None
    score: BlockScorer | None = None
    given: Sequence[Tensor] = ()
    callback: BlockCallback | None = None
    profile: bool = False
    router: DraftRouter | None = None

    def __post_init__(self) -> None:
        self.method = resolve_method(self.method, VideoMethod.paradigm)
        self.blocks = require_int("blocks", self.blocks, 1, MAX_BLOCKS)
        self.seed = require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.score is not None and not callable(self.score):  # an error of a call would only reject each draft
            raise TypeError(f"score must be a function or None, got {short_repr(self.score)}")
        for latents in self.given:
            if latents.ndim != 5 or latents.shape[2:] != self.model.block_shape[1:]:
                shape = list(self.model.block_shape[1:])
                raise ValueError(f"given must be latents [1, F, *{shape}], got {list(latents.shape)}")
        self.method.validate_models(self.model, self.score is not None, self.router is not None)
        self.stats = VideoStats(self.method.name, self.seed, threads=torch.get_num_threads())
        self.generators: dict[str, BlockGenerator] = {}
        self._tau: float | None = self.method.policy.tau
        self._decoder = self._scored = FrameDecoder(self.decoder)
        if self.preview is not None and self.method.policy.needs_scores:
            self._scored = FrameDecoder(self.preview)
        self._finished: tuple[Tensor, Tensor] | None = None  # latents of the first and the latest finished block
        self._cancelled = self._closed = False

    # -- control during generation -------------------------------------------------------------------------------------------

    @property
    def tau(self) -> float | None:
        """The current threshold, None if the method has none. A new value applies from the next decision on."""
        return self._tau

    @tau.setter
    def tau(self, value: float) -> None:
        if self._tau is None:
            raise ValueError(f"tau cannot be set: accelerator {self.method.name!r} compares no score with a threshold")
        self._tau = validate_threshold(value)

    @torch.no_grad()
    def change_prompt(self, condition: Any, score: BlockScorer | None = None) -> None:
        """Use another prompt from the next block on; finished blocks are unchanged. `score` must be for the new prompt.

        Raises:
            ValueError: if the method scores drafts, and no `score` is given.
        """
        if score is None and self.score is not None:
            raise ValueError("score must be given with a new prompt: the old one scores the old prompt")
        self.condition, self.score = condition, score
        with suppress(StopRequested):  # the next block raises it again
            for generator in self._caching():
                generator.change_prompt(condition)

    def cancel(self) -> None:
        """End the run within one pass; the current block is discarded."""
        self._cancelled = True

    def close(self) -> None:
        """Free the caches; no further block is generated."""
        self.generators, self._closed = {}, True
        self._decoder.state = self._scored.state = None

    # -- generation ----------------------------------------------------------------------------------------------------------

    @without_autocast
    def __next__(self) -> VideoBlock:
        try:
            if self._closed or len(self.stats.blocks) == self.blocks:
                raise StopIteration
            if self._cancelled:
                raise StopRequested
            with torch.no_grad(), normal_tensors():
                if not self.generators:
                    self._threads = block_threads(self.model, self.condition)
                with limit_threads(self._threads):
                    return self._make_block()
        except StopRequested:
            self.stats.stopped = True
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise

    def _make_block(self) -> VideoBlock:
        self.stats.threads = torch.get_num_threads()
        self._clock = Clock(self.model.device, self.profile)
        record = BlockRecord(len(self.stats.blocks), self.stats.seed)
        passes = {name: generator.passes for name, generator in self.generators.items()}
        parts = [] if self.generators else self._start()
        latents = self._generate(record)
        parts.append((latents, self._accept(record, latents)))
        self._add_finished(latents, last=record.number + 1 == self.blocks)
        record.seconds = self._clock.read() - self._clock.started
        record.seconds_by_part = dict(self._clock.parts)
        record.passes = {name: each.passes - passes.get(name, 0) for name, each in self.generators.items()}
        self.stats.blocks.append(record)
        self.stats.seconds += record.seconds
        latents, frames = torch.cat([part for part, _ in parts], 1), torch.cat([part for _, part in parts])
        return VideoBlock(record.number, latents[0], frames, record)

    def _start(self) -> list[tuple[Tensor, Tensor]]:
        """Start the models; return the given latents, each with its frames."""
        model, draft = self.model, self.model.draft_model
        frames = self.blocks * model.block_shape[0] + sum(latents.shape[1] for latents in self.given)
        options: dict[str, Any] = {"condition": self.condition, "frames": frames, "on_pass": self._after_pass}
        target = (model.generator_class or BlockGenerator)(model, lazy=self.method.lazy, **options)
        self.generators["target"] = target
        if draft is not None and self.method.needs_draft_model:
            shared = target if model.shares_cache else None
            self.generators["draft"] = (draft.generator_class or BlockGenerator)(draft, shared=shared, **options)
        parts = []
        for latents in (each.to(model.device, torch.float32) for each in self.given):
            self._add_finished(latents)
            parts.append((latents, self._decode(latents)))
        return parts

    def _generate(self, record: BlockRecord) -> Tensor:
        """Run the algorithm for one block: latents `[1, F, C, Y, X]`."""
        if not self._should_draft(record):
            return self._denoise("target")
        exit_step = self.method.exit_step
        draft = self._denoise("target", exit_step) if exit_step else self._denoise("draft")
        if self._verify(record, draft):
            record.source = "draft"
            return draft
        self._scored.latest = None  # frees the frames of the draft
        if not exit_step:
            return self._denoise("target")
        with self._clock.measure("target"):
            return self.generators["target"].resume()

    def _should_draft(self, record: BlockRecord) -> bool:
        """Return whether a block is drafted, and if not, record why."""
        if "draft" not in self.generators and not self.method.exit_step:
            record.outcome = "undrafted"
        elif record.number in self.method.target_blocks:
            record.outcome = "forced"
        elif self.method.policy.should_draft(record, self.stats.blocks):
            return True
        else:
            record.outcome = "undrafted"
        return False

    def _denoise(self, name: str, last: int | None = None) -> Tensor:
        """Generate the block with one model, or its estimate after `last` steps."""
        generator, shape, device = self.generators[name], self.model.block_shape, self.model.device
        with self._clock.measure("commit"):
            generator.update_cache()
        with self._clock.measure(name):
            noise = partial(make_block_noise, self.seed, len(self.stats.blocks), shape=shape, device=device)
            return generator.generate(noise, last)

    def _verify(self, record: BlockRecord, draft: Tensor) -> bool:
        """Return whether a draft is accepted, and record the outcome."""
        policy, record.tau = self.method.policy, self.tau
        if not isinstance(policy, SingleModel) and not bool(draft.isfinite().all()):
            record.failure = "the drafter's latents are not finite"
        elif policy.needs_scores:
            self._score(record, draft)
        elif policy.needs_router:
            self._rank(record, draft)
        accepted = record.failure is None and policy.should_accept(record, self.stats.blocks)
        record.outcome = "accepted" if accepted else "rejected"
        return accepted

    def _score(self, record: BlockRecord, draft: Tensor) -> None:
        """Score a draft by its worst frame, because a single broken one is visible (SDVG, arXiv:2604.17397)."""
        assert self.score is not None
        with self._clock.measure("decode"):
            frames, _ = self._scored.decode(draft)
        view = BlockView(record.number, draft[0], frames, self._scored.last_frame)
        with self._clock.measure("score"):
            try:
                scores = torch.as_tensor(self.score(view)).detach().float().reshape(-1).cpu()
            except Exception as error:  # user code: the target generates this block, and its record reports the error
                record.failure = f"the scorer raised {type(error).__name__}: {error}"
                return
        if scores.numel() and scores.isfinite().all():
            record.score, record.scores = float(scores.min()), scores.tolist()
        else:
            record.failure = f"the scorer returned {short_repr(scores.tolist())}, not finite numbers"

    def _rank(self, record: BlockRecord, draft: Tensor) -> None:
        """Score a draft by a router; 0 at the start of a video, which routers do not know."""
        assert self.router is not None
        record.score = 0.0
        if self._finished is not None:
            first, previous = self._finished
            with self._clock.measure("score"):
                record.score = 1 - self.router(DraftView(record.number, draft, previous, first))

    def _accept(self, record: BlockRecord, latents: Tensor) -> Tensor:
        """Check a finished block and return its frames."""
        if not bool(latents.isfinite().all()):
            model = "drafter" if record.source == "draft" and not self.method.exit_step else "target"
            raise NonFiniteLatentsError(
                f"the {model} generated NaN or infinite latents in block {record.number} of {self.blocks}; no frame is decoded "
                "from them. Check the checkpoint, or run with torch_dtype=torch.float32"
            )
        with self._clock.measure("decode"):
            return self._decode(latents)

    def _decode(self, latents: Tensor) -> Tensor:
        """Advance the decoders past a block and return its frames."""
        if self._scored is not self._decoder:
            self._scored.accept(latents)
        return self._decoder.accept(latents)

    def _add_finished(self, latents: Tensor, last: bool = False) -> None:
        """Pass a finished block to both models; each decides when to update its cache."""
        self._finished = (latents if self._finished is None else self._finished[0], latents)
        with self._clock.measure("commit"):
            for generator in self._caching():
                generator.add_finished(latents, last)

    def _caching(self) -> Collection[BlockGenerator]:
        """One generator for each cache."""
        return {id(generator.state): generator for generator in self.generators.values()}.values()

    def _after_pass(self) -> None:
        with normal_tensors():
            passes = sum(generator.passes for generator in self.generators.values())
            progress = BlockProgress(len(self.stats.blocks), self.blocks, passes)
            if self.callback is not None and self.callback(progress) is False:
                self._cancelled = True
        if self._cancelled:
            raise StopRequested


decode_video = BlockStream  # named like `decode` and `decode_scales`
