"""Verification of drafts, and decoding of what is accepted, in one video."""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.clock import Clock
from vargen.decoding.video.method import VideoMethod
from vargen.decoding.video.policies import PolicyState, SingleModel
from vargen.decoding.video.routing import DraftRouter, DraftView
from vargen.decoding.video.scoring import (
    BlockDecoder,
    BlockDecoderState,
    BlockScorer,
    BlockView,
    ScoreResult,
    score_block,
)
from vargen.decoding.video.stats import BlockRecord


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
