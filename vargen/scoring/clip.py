"""CLIP score: 100 times the cosine similarity of image and prompt embeddings, clipped at 0 (CLIPScore, Hessel et al. 2021,
who scale by 2.5). Scores of other models or weights are not comparable, so the scorer's name has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.compat import installed_version
from vargen.scoring.protocol import BatchedScorer, Images, require_local_file, to_pil
from vargen.values import one_line, short_repr, suggest_names
from vargen.weight_files import weights_digest

_HOW = "give weights=FILE, a checkpoint of open_clip (.safetensors or .pt), or, with network, one of its tags such as openai"


class CLIPScorer(BatchedScorer):
    """CLIP score by open_clip's model `model` with the weights `weights`.

    Args:
        model: a model name of open_clip, such as `ViT-B-32`, or `hf-hub:owner/name`.
        weights: a local checkpoint, or a pretrained tag of open_clip such as `openai`, downloaded once; not with `hf-hub:`.
        prefix: prepended to each prompt; "A photo depicts" is common with COCO captions.
    """

    def __init__(
        self,
        model: str = "ViT-B-32",
        weights: str | Path | None = "openai",
        prefix: str = "",
        device: torch.device | str = "cpu",
        batch_size: int = 32,
    ):
        if installed_version("open-clip-torch") is None:
            raise ImportError('CLIP needs open_clip: pip install "open-clip-torch>=2.24"')
        import open_clip

        hub = model.startswith(("hf-hub:", "local-dir:"))
        if not hub and model not in open_clip.list_models():
            hint = suggest_names(model, open_clip.list_models())[:200]
            raise ValueError(f"model must be a name of open_clip, got {short_repr(model)}; {hint}")
        given = None if hub or weights is None else str(weights)
        if not hub and given not in open_clip.list_pretrained_tags_by_model(model):
            given = str(require_local_file(given, "weights", f"CLIP model {model}", _HOW))
        try:
            network, _, self.preprocess = open_clip.create_model_and_transforms(model, pretrained=given, device=str(device))
            self.tokenize = open_clip.get_tokenizer(model)
        except MemoryError:
            raise
        except Exception as error:  # the hub, torch and safetensors each raise their own types
            what = f"weights {short_repr(given)} of CLIP model {model}" if given else f"CLIP model {model}"
            raise FileNotFoundError(f"{what} could not be opened ({one_line(error)}); {_HOW}") from error
        self.clip, self.prefix = network.eval().requires_grad_(False), prefix
        self.identity = f"clip-{model}-{weights_digest(self.clip)}-{prefix}"
        tag = Path(given).name if given and Path(given).exists() else given or ""
        super().__init__(f"clip {model} {tag}".strip(), device, batch_size)

    def score_batch(self, images: Images, prompts: Sequence[str]) -> Tensor:
        texts = self.tokenize([f"{self.prefix} {prompt}".strip() for prompt in prompts]).to(self.device)
        image = F.normalize(self.embed_images(images), dim=-1)
        text = F.normalize(self.clip.encode_text(texts).float(), dim=-1)
        return 100 * (image * text).sum(-1).clamp_min(0)

    def embed_images(self, images: Images) -> Tensor:
        """Return image embeddings, float32 `[N, E]`, not normalized."""
        batch = torch.stack([self.preprocess(image) for image in to_pil(images)]).to(self.device)
        return self.clip.encode_image(batch).float()
