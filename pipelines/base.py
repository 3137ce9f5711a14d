"""What pipelines of every family share: opening and saving, reading prompts, and saying which methods they can run.

Command, page and evaluation use this interface alone, so that a family is named in its own file and nowhere above.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vargen.compat import ensure_torchvision
from vargen.decoding import DEFAULT_METHOD

# from_pretrained finds this class by module path, so the module must have been imported.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.pipelines.calls import Calls
from vargen.pipelines.components import FAMILIES
from vargen.pipelines.loading import resolve_drafter
from vargen.pipelines.model_info import Decoder
from vargen.pipelines.quiet import placing
from vargen.pipelines.stored import StoredPipeline

ensure_torchvision()

from diffusers.image_processor import VaeImageProcessor


class VisualPipeline(StoredPipeline):
    """Text or class to picture, with an autoregressive model of any family.

    A family implements `__call__` and the abstract methods below.

    Attributes:
        output: class of a call's result, of `images` and `stats`.
        usual_sampling: where neither a call nor a checkpoint says another.
    """

    output: ClassVar[Any]
    baseline: ClassVar[str] = "ar"
    default_method: ClassVar[str] = DEFAULT_METHOD
    usual_sampling: ClassVar[dict[str, Any]] = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0}
    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["draft_transformer"]  # small, and it takes turns with the transformer
    _optional_components: ClassVar[list[str]] = ["text_encoder", "tokenizer", "draft_transformer"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    transformer: Any
    vqvae: Any
    draft_transformer: Any
    text_encoder: Any
    tokenizer: Any

    def _set_up(self, parts: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Check the parts and the values kept beside them, and register both; the body of every `__init__`.

        Raises:
            ValueError: for parts that do not belong together, class names, defaults or styles that a call could not use.
        """
        self._register(parts, config, prompt_names)
        # Opened with transformer=None and vqvae=None, a pipeline still encodes prompts.
        factor = 8 if self.vqvae is None else self.vqvae.downsampling
        self.image_processor = VaeImageProcessor(vae_scale_factor=factor)
        self._calls = Calls()
        self._compiled: Any = None

    def load_drafter(self, drafter: Any) -> str:
        """Open a drafter that was trained for this model, as `vargen train drafter` makes them, and draft with it from now on.

        Saving the pipeline saves it along, as one of its components, so that opening it again needs no `load_drafter`.

        Args:
            drafter: a folder, or the name of a packaged one, such as `"emoji/eagle"`.

        Returns:
            Which component it became: `"eagle"`, say.

        Raises:
            ValueError: for no trained drafter, one of another width, vocabulary or grid than the transformer, damaged files, or
                a folder that holds code; before a weight is read.
        """
        if self.transformer is None:
            raise ValueError("this pipeline was loaded without a transformer: there is nothing to draft for")
        family = FAMILIES[type(self).__name__]
        component, folder = resolve_drafter(drafter, family, self.transformer.config)
        kind: Any = family.networks[component]
        network = kind.from_pretrained(folder, torch_dtype=self.transformer.dtype, use_safetensors=True, **placing())
        self.register_modules(**{component: network.to(self._device_of(self.transformer)).eval()})
        return component

    # -- what it is -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def decoder(self, settings: Mapping[str, Any]) -> Decoder:
        """Draws tokens with these `guidance_scale`, `temperature`, `top_k`, `top_p`; those not given are the checkpoint's."""

    @abstractmethod
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Pictures of tokens `[B, N]`; what lies past `length [B]` is left white."""

    @abstractmethod
    def preview(self, tokens: Tensor, drawn: int) -> list[Image.Image]:
        """Pictures of which the first `drawn` tokens of `[B, N]` are there; transparent where nothing can be seen yet."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Tokens V to draw from."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens N of a picture."""

    @property
    @abstractmethod
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens of a picture, in drawing order, raster order in each: one grid, or one per scale."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the finest, or only, grid."""
        return self.grids[-1]

    @property
    @abstractmethod
    def steps(self) -> int:
        """Passes that the baseline takes for a picture."""

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """Float `[V, C]`, vectors that say how alike two tokens are."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance, temperature and filters where a call gives none: the checkpoint's own, else the family's."""
        stored = {name: value for name, value in (self.config.defaults or {}).items() if value is not None}
        usual = dict(self.usual_sampling)
        if usual["top_k"] is not None and usual["top_k"] > self.vocab:
            usual["top_k"] = None
        return {**usual, **stored}

    @property
    def guidance_scale(self) -> float:
        """Of this thread's call, or the one that began or ended last; as the next three are."""
        return self._calls.current.guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self.guidance_scale != 1.0

    @property
    def num_timesteps(self) -> int:
        """Steps that a call takes at most."""
        return self._calls.current.num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether someone set `_interrupt`, which ends a call with what is drawn."""
        return self._calls.current.interrupt

    @property
    def _interrupt(self) -> bool:
        """Set in a callback, as diffusers has it, it ends the callback's own call; set in another thread, all that run."""
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool) -> None:
        self._calls.interrupt(value)

    # -- the call -------------------------------------------------------------------------------------------------------

    def _step(self) -> Any:
        """The transformer, compiled."""
        if self._compiled is None or self._compiled._orig_mod is not self.transformer:
            self._compiled = torch.compile(self.transformer, dynamic=False)
        return self._compiled
