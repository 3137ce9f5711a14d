"""`VisualPipeline`, the base class of all families: all that commands, page and evaluation use."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vargen.decoding import DEFAULT_METHOD, Sampling, list_methods, resolve_method
from vargen.models.guidance import Guidance
from vargen.pipelines import prompts, validation
from vargen.pipelines.engines import KeptEngines
from vargen.pipelines.prompts import NormalizedPrompt
from vargen.pipelines.stored_pipeline import StoredPipeline
from vargen.scoring import open_scorer
from vargen.scoring.protocol import Scorer, to_scorer
from vargen.values import require_int, short_repr


@dataclass(frozen=True)
class MethodInfo:
    """A preset, of kind `"exact"` or `"relaxed"`, and why a pipeline cannot run it; None if it can."""

    name: str
    kind: str
    summary: str
    source: str
    unsupported_reason: str | None = None


@dataclass(eq=False)
class RunningCall:
    """A running call, with the number of its thread."""

    thread: int
    interrupted: bool = False


class VisualPipeline(StoredPipeline):
    """Generation of images or videos with an autoregressive model of any family.

    A family implements `__call__` and the abstract methods below.

    Attributes:
        paradigm: selects the presets that this pipeline runs: next-token, next-scale or video.
        baseline, default_method: presets that speedups are relative to, and that a call uses by default.
        summary: what calls by `vargen.enable` add their statistics to.
        usual_sampling: sampling settings used where neither the call nor the checkpoint sets them.
        image_size: width and height in pixels of the source image of a call, or rows and columns if they differ; None if calls
            take no image.
        makes_images: False if another pipeline decodes the tokens.
        joins_running_batch: whether images can join a batch while others are generated; else they wait for the next one.
    """

    paradigm: ClassVar[str]
    baseline: ClassVar[str] = "ar"
    default_method: Any = DEFAULT_METHOD
    summary: Any = None
    joins_running_batch: ClassVar[bool] = False
    usual_sampling: ClassVar[dict[str, Any]] = {
        "guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0
    }  # fmt: skip
    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    transformer: Any
    vqvae: Any
    draft_transformer: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
    fps: int | None = None
    image_size: Any = None
    makes_images: bool = True

    def _init_calls(self) -> None:
        """Create what calls use beside the components."""
        self._opened: dict[Any, Any] = {}  # scorers and other models
        self._calls: list[RunningCall] = []
        self._engines = KeptEngines()

    def validate_method(self, method: Any) -> None:
        """Raise ValueError with the reason if this pipeline, with weights or without, cannot run a method."""
        self.resolve_method(method).bind(self.decoding_model())

    def list_methods(self) -> list[MethodInfo]:
        """List the presets of this paradigm, each with the reason if this pipeline cannot run it."""
        found = []
        for preset in list_methods(self.paradigm):
            reason = None
            try:
                self.validate_method(preset)
            except (ValueError, TypeError) as error:
                reason = str(error)
            found.append(MethodInfo(preset.name, preset.kind, preset.summary, preset.source, reason))
        return found

    def resolve_method(self, accelerator: Any) -> Any:
        """Return the method for a preset name, or the given method itself, if it belongs to this paradigm."""
        return resolve_method(accelerator, self.paradigm)

    @abstractmethod
    def decoding_model(self, *arguments: Any, **options: Any) -> Any:
        """Return the adapter of the transformers for the loop; image models take guidance, or its scale."""

    @property
    def is_class_conditional(self) -> bool:
        """Whether the model is conditioned on classes instead of text."""
        return self.transformer.config.get("condition") == "class"

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for models of text."""
        return self.transformer.config.get("num_classes") or 0 if self.is_class_conditional else 0

    @property
    def reads_prompts(self) -> bool:
        """Whether it encodes prompts itself."""
        return self.text_encoder is not None

    @property
    def class_names(self) -> dict[int, str]:
        """Comma-separated synonyms by class number; empty if the checkpoint has no class names."""
        return {int(number): names for number, names in (self.config.get("id2label") or {}).items()}

    @property
    @abstractmethod
    def max_caption_tokens(self) -> int:
        """Maximum number of caption tokens that the transformer accepts."""

    def normalize_prompt(self, prompt: str) -> NormalizedPrompt:
        """Replace characters by their names (see `prompt_names`), which the result has by character."""
        if self.prompt_names is None or prompt.isascii():
            return NormalizedPrompt(prompt, {})
        return self.prompt_names.apply(prompt)

    encode_prompt = prompts.encode_prompt

    encode_condition = prompts.encode_condition

    def open_once(self, opener: Callable[[str, torch.device], Any], name: str) -> Any:
        """Return what an opener, such as `open_scorer`, returns for a name and this device; kept for later."""
        key = opener, name, self._execution_device
        if key not in self._opened:
            self._opened[key] = opener(name, self._execution_device)
        return self._opened[key]

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V."""
        return self.transformer.config.vocab_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens N of an image."""
        return sum(rows * columns for rows, columns in self.grids)

    @property
    @abstractmethod
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the token grids, each in raster order: one, or one per scale."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the only grid, or of the finest one."""
        return self.grids[-1]

    @property
    @abstractmethod
    def num_baseline_passes(self) -> int:
        """Number of forward passes that the baseline takes for an image."""

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """Float `[V, C]`: embeddings whose distances measure how similar two tokens are."""

    @abstractmethod
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens `[B, N]` to images; the area past `length [B]` is left white, or not refined."""

    @abstractmethod
    def preview(self, tokens: Tensor, num_tokens: int) -> list[Image.Image]:
        """Decode the first `num_tokens` of tokens `[B, N]` to partial images, else transparent."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling settings that a call uses by default: the checkpoint's, else the family's."""
        stored = {name: value for name, value in (self.config.defaults or {}).items() if value is not None}
        usual = {**VisualPipeline.usual_sampling, **self.usual_sampling}
        if usual["top_k"] is not None and usual["top_k"] > self.vocab_size:
            usual["top_k"] = None
        return {**usual, **stored}

    def check_inputs(
        self,
        output_type: Any = "pil",
        callback: Any = None,
        tensor_inputs: Any = None,
        num_candidates: Any = 1,
        scorer: Any = None,
        batch_size: Any = None,
    ) -> Scorer | None:
        """Validate arguments of a call that do not depend on one another; returns the scorer."""
        if not self.has_weights:
            raise ValueError("transformer has no weights: open the model with open_pipeline instead of inspect_model")
        if not self.makes_images and (output_type != "latent" or scorer is not None):
            name = type(self.transformer).__name__
            raise ValueError(f"output_type must be 'latent' and scorer left out: another pipeline decodes the tokens of {name}")
        if self.transformer is None or getattr(self, self.pixel_decoder) is None:
            raise ValueError(f"this pipeline was loaded without a transformer or {self.pixel_decoder}: it only encodes prompts")
        if not isinstance(output_type, str) or output_type not in validation.OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(validation.OUTPUT_TYPES)}, got {short_repr(output_type)}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback_on_step_end must be a function, or None, got {short_repr(callback)}")
        known, named = self._callback_tensor_inputs, () if tensor_inputs is None else tensor_inputs
        if not isinstance(named, list | tuple | set | frozenset) or any(name not in known for name in named):
            raise ValueError(f"callback_on_step_end_tensor_inputs must be among {known}, got {short_repr(tensor_inputs)}")
        if batch_size is not None:
            validation.validate_batch_size(batch_size, "batch_size")
        if require_int("num_candidates", num_candidates, 1) > 1 and scorer is None:
            raise ValueError(f"scorer must be given to choose among {num_candidates} candidates")
        return self.open_once(open_scorer, scorer) if isinstance(scorer, str) else scorer and to_scorer(scorer)

    def resolve_sampling(self, guidance_interval: Any = None, **given: Any) -> tuple[Guidance, Sampling]:
        """Return guidance and sampling options of a call; None selects the checkpoint's default."""
        settings = {**self.default_sampling, **{name: value for name, value in given.items() if value is not None}}
        guidance = Guidance(settings.pop("guidance_scale"), guidance_interval)
        sampling = Sampling(**settings)
        sampling.validate_top_k(self.vocab_size)
        return guidance, sampling

    @contextmanager
    def _start_call(self) -> Iterator[RunningCall]:
        """Register a call of this thread while the block runs, so that an interrupt ends the right one."""
        call = RunningCall(threading.get_ident())
        self._calls.append(call)
        try:
            yield call
        finally:
            self._calls.remove(call)

    def _current_calls(self) -> list[RunningCall]:
        """The innermost call of this thread; in a thread without one, all running calls."""
        calls = list(self._calls)
        return [call for call in calls if call.thread == threading.get_ident()][-1:] or calls

    @property
    def interrupt(self) -> bool:
        """Whether this thread's call, or in a thread without a call any running call, was interrupted.

        Setting it, or `_interrupt` as in diffusers, in a callback stops that call; in another thread, all running calls.
        """
        return any(call.interrupted for call in self._current_calls())

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        for call in self._current_calls():
            call.interrupted = value

    _interrupt = interrupt
