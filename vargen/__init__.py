"""Fast visual autoregressive generation.

Public names are loaded on first use, so `import vargen` is cheap and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vargen.decoding import Accelerator, DecodeStats
    from vargen.in_place.enabling import disable, enable, summary, supported
    from vargen.models.llamagen.network import LlamaGenTransformer
    from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
    from vargen.models.tokenizers.vq import VQModel
    from vargen.models.var.network import VARTransformer
    from vargen.pipelines.accelerate import accelerate
    from vargen.pipelines.causal_video import CausalVideoPipeline
    from vargen.pipelines.infinity import InfinityPipeline
    from vargen.pipelines.llamagen import LlamaGenPipeline
    from vargen.pipelines.loading import open_pipeline
    from vargen.pipelines.var import VARPipeline

from vargen.compat import ensure_torchvision
from vargen.device import set_passive_openmp_wait

set_passive_openmp_wait()  # must run before torch is imported: OpenMP reads its wait policy once
ensure_torchvision()

__version__ = "0.2.0"

__all__ = [
    "Accelerator",
    "CausalVideoPipeline",
    "DecodeStats",
    "InfinityPipeline",
    "LlamaGenPipeline",
    "LlamaGenTransformer",
    "MultiScaleVQModel",
    "VARPipeline",
    "VARTransformer",
    "VQModel",
    "__version__",
    "accelerate",
    "disable",
    "enable",
    "open_pipeline",
    "summary",
    "supported",
]

# Maps each public name to the module that defines it.
_HOMES = {
    "Accelerator": "vargen.decoding",
    "CausalVideoPipeline": "vargen.pipelines.causal_video",
    "DecodeStats": "vargen.decoding",
    "InfinityPipeline": "vargen.pipelines.infinity",
    "LlamaGenPipeline": "vargen.pipelines.llamagen",
    "LlamaGenTransformer": "vargen.models.llamagen.network",
    "MultiScaleVQModel": "vargen.models.tokenizers.multi_scale_vq",
    "VARPipeline": "vargen.pipelines.var",
    "VARTransformer": "vargen.models.var.network",
    "VQModel": "vargen.models.tokenizers.vq",
    "accelerate": "vargen.pipelines.accelerate",
    "disable": "vargen.in_place.enabling",
    "enable": "vargen.in_place.enabling",
    "open_pipeline": "vargen.pipelines.loading",
    "summary": "vargen.in_place.enabling",
    "supported": "vargen.in_place.enabling",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vargen' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
