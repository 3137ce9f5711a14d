"""What a pipeline does while its weights are offloaded: where it runs, and what it refuses."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Self

import torch

from vargen.models.storage import find_device, is_offloaded, require_weights


def require_accelerate(method: str) -> None:
    """Raise ImportError, which says what to install, if accelerate is missing."""
    if find_spec("accelerate") is None:
        raise ImportError(f"{method} needs accelerate: pip install accelerate")


class OffloadedPipeline:
    """Base of pipelines whose components may be offloaded by diffusers, or one by one by accelerate."""

    def _networks(self) -> dict[str, torch.nn.Module]:
        parts: dict[str, Any] = self.components  # type: ignore[attr-defined]
        return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}

    def _device_of(self, component: Any) -> torch.device:
        """Device on which a component runs. While it is offloaded, its weights are on another one."""
        return find_device(component) if is_offloaded(component) else component.device

    @property
    def _execution_device(self) -> torch.device:
        """As in diffusers, which overlooks components that are offloaded one by one."""
        offloaded = next((part for part in self._networks().values() if is_offloaded(part)), None)
        return super()._execution_device if offloaded is None else find_device(offloaded)  # type: ignore[misc]

    @property
    def has_weights(self) -> bool:
        """Whether it is no pipeline of `inspect_model`."""
        network: Any = self.transformer  # type: ignore[attr-defined]
        return network is None or network.device.type != "meta" or is_offloaded(network)

    def require_weights(self, action: str) -> None:
        """Raise ValueError naming a component whose weights are elsewhere; see `vargen.models.storage.require_weights`."""
        for name, network in self._networks().items():
            require_weights(network, action, name)

    def maybe_free_model_hooks(self) -> None:
        """As in diffusers, which looks at all components even where none is offloaded."""
        if getattr(self, "_all_hooks", None):
            super().maybe_free_model_hooks()  # type: ignore[misc]

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """As in diffusers."""
        require_accelerate("enable_model_cpu_offload")
        super().enable_model_cpu_offload(*args, **kwargs)  # type: ignore[misc]

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """As in diffusers."""
        require_accelerate("enable_sequential_cpu_offload")
        super().enable_sequential_cpu_offload(*args, **kwargs)  # type: ignore[misc]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As in diffusers.

        Raises:
            ValueError: while weights are offloaded layer by layer, because hooks would load them as they were before.
        """
        self.require_weights("moved or cast")
        moved: Self = super().to(*args, **kwargs)  # type: ignore[misc]
        return moved
