"""The image model of the page: loaded once, tested for the methods that it supports, and run in background threads."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from vargen.decoding import DecodeStats
from vargen.demo.jobs import Job, JobResult
from vargen.demo.previews import PreviewSchedule
from vargen.demo.request import MAX_RACERS, ImageFolder, PageRequest
from vargen.image_metadata import tokens_digest
from vargen.pipelines.base import MethodInfo, VisualPipeline
from vargen.pipelines.prompts import describe_unread_text
from vargen.pipelines.regeneration import describe_environment, describe_seed
from vargen.scoring import DEFAULT_SCORER
from vargen.scoring.protocol import Scorer, score_images
from vargen.values import short_repr

logger = logging.getLogger("vargen")

_LIVE_PASSES = 16  # most passes per image of the baseline


class ImageService:
    """A loaded image pipeline, and the operations that the page needs.

    Args:
        pipe: of any family, on its device.
        name: display name of the model; not a path.
        scorer: scores how well an image matches its prompt, and selects among candidates; None for no scores.
        scorer_name: as `vargen generate --scorer` takes it.
        digest: of the model's weights; None if they are no folder's.
        concurrency: number of jobs at a time.
    """

    def __init__(
        self,
        pipe: VisualPipeline,
        name: str,
        scorer: Scorer | None = None,
        scorer_name: str = DEFAULT_SCORER,
        digest: str | None = None,
        concurrency: int = 1,
    ):
        self.digest = digest
        self.pipe, self.name, self.scorer, self.scorer_name = pipe, name, scorer, scorer_name
        pipe.set_progress_bar_config(disable=True)
        self.by_class: bool = pipe.is_class_conditional
        self.grids, self.total = pipe.grids, pipe.num_tokens  # per image: grids in generation order, and tokens
        self.baseline: str = pipe.baseline
        self.live = pipe.num_baseline_passes <= _LIVE_PASSES  # fast enough to generate during typing
        self.vocab: int = pipe.vocab_size
        self.folder = ImageFolder()
        # Threads are reused, because each new one would create another thread pool in torch.
        self._threads = ThreadPoolExecutor(max_workers=2 * MAX_RACERS + concurrency, thread_name_prefix="generate")
        self.methods = {method.name: self._probe_method(method) for method in pipe.list_methods()}

    @property
    def available(self) -> list[MethodInfo]:
        return [method for method in self.methods.values() if method.unsupported_reason is None]

    def method(self, name: str) -> MethodInfo | None:
        """Return a method by name, with or without settings such as `gumbel:window=8`; None for an unknown one."""
        preset, colon, _ = name.partition(":")
        found = self.methods.get(preset)
        if found is None or found.unsupported_reason is not None or not colon:
            return found
        try:
            method = self.pipe.resolve_method(name)
            self.pipe.validate_method(method)
        except (ValueError, TypeError) as error:
            return replace(found, name=name, unsupported_reason=str(error))
        return replace(found, name=name, kind=method.kind)

    @property
    def default_method(self) -> str:
        """The method used if none is selected: the pipeline's default, or else one that the model supports."""
        names = [each.name for each in self.available]
        return self.pipe.default_method if self.pipe.default_method in names else names[0]

    def repeats_baseline(self, method: str) -> bool:
        """Whether a method, not the baseline itself, generates the baseline's image for a seed, rounding errors aside."""
        here = self.environment
        rounds = here["dtype"] != "float32" or ("quantization" in here and self.pipe.device.type != "cpu")
        return method != self.baseline and not rounds and self.pipe.resolve_method(method).sequential_tokens

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling defaults of the checkpoint, as `PageRequest` takes them."""
        stored = self.pipe.default_sampling
        return {**stored, "top_k": stored["top_k"] or 0}

    @property
    def styles(self) -> tuple[str, ...]:
        """Style words in the captions of the training data; empty if unknown."""
        return tuple(self.pipe.config.prompt_styles or ())

    @property
    def class_names(self) -> list[str]:
        return [names.split(",")[0] for names in self.pipe.class_names.values()]

    def _probe_method(self, method: MethodInfo) -> MethodInfo:
        """Job one pass of a method that should work, so that a failure on this machine shows at startup, not during a
        request.
        """
        if method.unsupported_reason is not None:
            return method
        subject = {"class_labels": 0} if self.by_class else {"prompt": "probe"}
        try:
            stop = {"stop": True}
            self.pipe(**subject, accelerator=method.name, output_type="latent", callback_on_step_end=lambda *_: stop)
        except Exception as error:
            logger.info("method %s is not available: %s", method.name, error)
            readable = isinstance(error, ValueError | TypeError)
            return replace(
                method, unsupported_reason=str(error) if readable else "it failed at startup; the server's log has the reason"
            )
        return method

    def check(self, request: PageRequest) -> None:
        """Raise ValueError, with a message for users, if this model does not support the request."""
        method = self.method(request.method)
        if method is None or method.unsupported_reason is not None:
            why = f": {method.unsupported_reason}" if method else ""
            names = ", ".join(each.name for each in self.available)
            raise ValueError(f"The method {short_repr(request.method)} is not available here{why}. Choose one of: {names}.")
        if request.best_of > 1 and self.scorer is None:
            raise ValueError("There is no scorer here to choose among candidates: generate one candidate per image.")
        if request.top_k > self.vocab:
            raise ValueError(f"Top-k must be at most {self.vocab}, the size of the vocabulary; 0 keeps all tokens.")
        if self.by_class and request.negative_prompt:
            raise ValueError("This model generates classes, so it takes no negative prompt.")
        if self.by_class:
            self._condition(request)

    def prompt_warnings(self, prompt: str) -> str | None:
        """Describe what the model cannot read of a prompt: words in another script, and text beyond the maximum length."""
        if self.by_class or self.pipe.tokenizer is None:
            return None
        prompt = self.pipe.normalize_prompt(prompt).text
        reasons = describe_unread_text(self.pipe.tokenizer, prompt, self.pipe.max_caption_tokens)
        return " ".join(f"{each[0].upper()}{each[1:]}." for each in reasons) or None

    def _condition(self, request: PageRequest) -> dict[str, Any]:
        """Return the prompts or the class as arguments of the pipeline."""
        if not self.by_class:
            return {"prompt": request.prompt, **({"negative_prompt": request.negative_prompt or None})}
        label: int | str = int(request.prompt) if request.prompt.isdecimal() else request.prompt
        known = {name.strip().lower() for text in self.pipe.class_names.values() for name in text.split(",")}
        classes = self.pipe.transformer.config.num_classes
        if isinstance(label, int) and label >= classes:
            raise ValueError(f"This model has the classes 0 to {classes - 1}, not {label}.")
        if isinstance(label, str) and label.lower() not in known:
            raise ValueError(f"This model has no class {label!r}. Give the name or the number of a class.")
        return {"class_labels": label}

    # -- generation -----------------------------------------------------------------------------------------------------------

    def start(
        self,
        request: PageRequest,
        stop: threading.Event | None = None,
        previews: bool = True,
        every_pass: bool = False,
    ) -> Job:
        """Start a job in another thread.

        Args:
            request: checked by `check`.
            stop: set it to end the job within one pass.
            previews: whether to decode partial images during generation. every_pass: after each pass, regardless of the cost.
        """
        job = Job(request, self.pipe.num_tokens, stop or threading.Event())
        show = PreviewSchedule(self.pipe, job, previews, every_pass)
        self._threads.submit(self._run_job, job, show)
        return job

    def _run_job(self, job: Job, show: PreviewSchedule) -> None:
        try:
            job.started = time.perf_counter()
            job.finished = self._generate(job, show)
        except BaseException as error:
            job.error = error
        finally:
            job.done.set()

    def _generate(self, job: Job, show: PreviewSchedule) -> JobResult:
        """Generate the images of a job."""
        request = job.request

        def after_pass(_: Any, step: int, done: int, tensors: dict[str, Any]) -> dict[str, Any]:
            job.counts.append(done - job.tokens)
            job.tokens = done
            if job.stop.is_set():
                return {"stop": True}
            job.preview_seconds += show(tensors["latents"], done)
            return {}

        several = {"num_candidates": request.best_of, "scorer": self.scorer} if request.best_of > 1 else {}
        result = self.pipe(
            **self._condition(request),
            **(request.source.arguments() if request.source else {}),
            **several,
            num_images_per_prompt=request.num_images,
            guidance_scale=request.guidance_scale,
            temperature=request.temperature,
            top_k=request.top_k or self.vocab,  # None would select the checkpoint's default
            top_p=request.top_p,
            accelerator=job.request.method,
            generator=[torch.Generator().manual_seed(request.seed + k) for k in range(request.num_images)],
            callback_on_step_end=after_pass,
        )
        return self._make_result(job, result.images, result.tokens, result.stats)

    def _make_result(self, job: Job, images: list[Image.Image], tokens: torch.Tensor, stats: DecodeStats) -> JobResult:
        request, records = job.request, [describe_seed(stats, k) for k in range(len(images))]
        if stats.scorer is None and not stats.stopped:
            scores = self._score_images(request, images)
            records = [{**record, **score} for record, score in zip(records, scores, strict=True)]
        return JobResult(request, images, tokens.cpu(), stats, stats.seconds - job.preview_seconds, stats.stopped, records)

    def _score_images(self, request: PageRequest, images: list[Image.Image]) -> list[dict[str, Any]]:
        """Score each image; an image is still returned if its scoring fails."""
        if self.scorer is None:
            return [{}] * len(images)
        try:
            words = request.prompt if self.by_class else self.pipe.normalize_prompt(request.prompt).text
            scores = score_images(self.scorer, images, [words] * len(images)).tolist()
        except Exception:
            logger.exception("the scorer %s failed", self.scorer_name)
            return [{}] * len(images)
        return [{"scorer": self.scorer.name, "score": score} for score in scores]

    @property
    def environment(self) -> dict[str, Any]:
        """What images record about model and machine."""
        digest = {"model_digest": self.digest} if self.digest else {}
        return {**describe_environment(self.pipe), "model": self.name, **digest}

    def parameters(self, request: PageRequest, result: JobResult) -> dict[str, Any]:
        """Return the parameters stored in an image's PNG: its request, and what is needed to reproduce it."""
        own = request.parameters()
        if self.by_class:
            own["class_label"] = own.pop("prompt")
        return {
            **own,
            **self.environment,
            "seconds": round(result.seconds, 3),
            "tokens_per_pass": round(result.stats.tokens_per_pass, 3),
        }

    def save(self, result: JobResult) -> list[str]:
        """Write the images of a finished job; returns their files."""
        records = (self.image_parameters(result, number) for number in range(len(result.images)))
        return [str(self.folder.save(image, each)) for image, each in zip(result.images, records, strict=True)]

    def image_parameters(self, result: JobResult, number: int) -> dict[str, Any]:
        """Return the parameters stored in the PNG of an image of a finished job."""
        tokens = {"tokens_digest": tokens_digest(result.tokens[number])}
        return {**self.parameters(result.request.single(number), result), **result.records[number], **tokens}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.folder.close()
