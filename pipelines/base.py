"""`VisualPipeline`, the base class of the image pipelines.

The command line, the demo page and the evaluation use only this interface, so no code above `pipelines/` names a family.
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

# Imported for its side effect: from_pretrained finds this class by module path.
from vargen.models.text_encoder import MiniLMTextEncoder  # noqa: F401
from vargen.pipelines.calls import Calls
from vargen.pipelines.loading import load_trained_networks
from vargen.pipelines.model_info import Decoder
from vargen.pipelines.stored import StoredPipeline

ensure_torchvision()

from diffusers.image_processor import VaeImageProcessor


class VisualPipeline(StoredPipeline):
    """Text-to-image or class-to-image generation with an autoregressive model of any family.

    A family implements `__call__` and the abstract methods below.

    Attributes:
        output: class of a call's result, with `images` and `stats`.
        usual_sampling: sampling settings used where neither the call nor the checkpoint sets them.
    """

    output: ClassVar[Any]
    baseline: ClassVar[str] = "ar"
    default_method: ClassVar[str] = DEFAULT_METHOD
    usual_sampling: ClassVar[dict[str, Any]] = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": None, "top_p": 1.0}
    model_cpu_offload_seq = "text_encoder->transformer->vqvae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]

    transformer: Any
    vqvae: Any
    draft_transformer: Any = None
    text_encoder: Any
    tokenizer: Any

    def _set_up(self, parts: Mapping[str, Any], config: Mapping[str, Any], prompt_names: Any) -> None:
        """Validate and register the components and the values stored with them. This is the body of every `__init__`.

        Raises:
            ValueError: for components that do not match each other, or class names, defaults or styles that are not valid.
        """
        self._register(parts, config, prompt_names)
        # A pipeline loaded with transformer=None and vqvae=None can still encode prompts.
        factor = 8 if self.vqvae is None else self.vqvae.downsampling
        self.image_processor = VaeImageProcessor(vae_scale_factor=factor)
        self._calls = Calls()
        self._compiled: Any = None

    def load_drafter(self, drafter: Any, *others: Any) -> str:
        """Load a network that `vargen train drafter` trained for this model, and use it in later calls.

        It becomes a component of the pipeline: `save_pretrained` writes it and `from_pretrained` restores it.

        Args:
            drafter: folder of the training run or of the saved network, or the name of a packaged one, such as `"emoji/eagle"`.
            others: further ones, such as the up-sampler of a low-resolution transformer. All are loaded, or none.

        Returns:
            Name of the component of `drafter`, such as `"eagle"`.

        Raises:
            ValueError: before any weight is read, if a folder holds no such network, damaged files or code, or if the network
                does not match the transformer.
        """
        if self.transformer is None:
            raise ValueError("this pipeline was loaded without a transformer: there is nothing to draft for")
        networks, device = load_trained_networks(self, drafter, *others), self._device_of(self.transformer)
        self.register_modules(**{name: network.to(device) for name, network in networks.items()})
        return next(iter(networks))

    # -- properties -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def decoder(self, settings: Mapping[str, Any]) -> Decoder:
        """Decoder with these `guidance_scale`, `temperature`, `top_k` and `top_p`; the checkpoint's where not given."""

    @abstractmethod
    def decode_tokens(self, tokens: Tensor, length: Tensor | None = None, output_type: str = "pil") -> Any:
        """Decode tokens `[B, N]` to images. The area of tokens past `length [B]` is left white."""

    @abstractmethod
    def preview(self, tokens: Tensor, drawn: int) -> list[Image.Image]:
        """Decode the first `drawn` of tokens `[B, N]` to partial images, transparent where nothing has been generated yet."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Vocabulary size V."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of tokens N of an image."""

    @property
    @abstractmethod
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of an image's token grids in generation order, each in raster order: one, or one per scale."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the only grid, or of the finest one."""
        return self.grids[-1]

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of forward passes that the baseline takes for an image."""

    @property
    @abstractmethod
    def codebook(self) -> Tensor:
        """Float `[V, C]`: embeddings whose distances measure how similar two tokens are."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Guidance scale, temperature, top-k and top-p that a call uses by default: the checkpoint's, else the family's."""
        stored = {name: value for name, value in (self.config.defaults or {}).items() if value is not None}
        usual = dict(self.usual_sampling)
        if usual["top_k"] is not None and usual["top_k"] > self.vocab:
            usual["top_k"] = None
        return {**usual, **stored}

    @property
    def guidance_scale(self) -> float:
        """Of this thread's call, else of the call that started or ended last; so are the next three properties."""
        return self._calls.current.guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self.guidance_scale != 1.0

    @property
    def num_timesteps(self) -> int:
        """Maximum number of steps of a call."""
        return self._calls.current.num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether `_interrupt` was set, which stops the call and returns the tokens generated so far."""
        return self._calls.current.interrupt

    @property
    def _interrupt(self) -> bool:
        """As in diffusers. Setting it in a callback stops that call; setting it in another thread stops all running calls."""
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool) -> None:
        self._calls.interrupt(value)

    # -- the call -------------------------------------------------------------------------------------------------------

    def _step(self) -> Any:
        """Return the transformer wrapped in `torch.compile`; later calls reuse the wrapper."""
        if self._compiled is None or self._compiled._orig_mod is not self.transformer:
            self._compiled = torch.compile(self.transformer, dynamic=False)
        return self._compiled
