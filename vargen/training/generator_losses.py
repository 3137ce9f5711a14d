"""What a generator's training adds to the next-token loss: dropped captions, noise, shared weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer


def drop_captions(condition: Condition, model: LlamaGenTransformer, dropped: Tensor) -> Condition:
    """The null caption where `dropped [B]` is True, behind the row's own mask, as guidance uses it."""
    null = model.null_condition(condition)
    assert condition.caption_embeds is not None and null.caption_embeds is not None
    embeds = torch.where(dropped[:, None, None].to(model.device), null.caption_embeds, condition.caption_embeds)
    return Condition(caption_embeds=embeds, caption_mask=condition.caption_mask)


def noisy(tokens_BN: Tensor, most: float) -> Tensor:
    """Input tokens with a share, uniform from 0 to `most` for each picture, of tokens from anywhere in the batch.

    Drawn pictures hold errors that real ones lack. A model that has seen some leans less on each token and more on the caption.
    """
    share = torch.rand(len(tokens_BN), 1, device=tokens_BN.device) * most
    others = tokens_BN.flatten()[torch.randperm(tokens_BN.numel(), device=tokens_BN.device)].view_as(tokens_BN)
    return torch.where(torch.rand(tokens_BN.shape, device=tokens_BN.device) < share, others, tokens_BN)


class CodePrior(nn.Module):
    """Weights that tokens share by where their codes lie, added to the embedding and the head while training.

    A head of rows R phi(c), with phi the code's entries and their products, makes logits a quadratic form in the code: like
    codes get like probabilities before each token has been seen often enough to learn its own row. Saving folds the sum into
    plain weights, so the trained model is an ordinary one.

    Args:
        codes_VE: the codebook. dim: width of the model. given: whether the model's own weights are trained ones, which the sums
            must not change before the first step.
    """

    def __init__(self, codes_VE: Tensor, dim: int, given: bool = False):
        super().__init__()
        E = codes_VE.shape[1]
        i, j = torch.triu_indices(E, E)
        products = codes_VE[:, i] * codes_VE[:, j]
        features = torch.cat([codes_VE, products], dim=1)
        features = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
        self.register_buffer("features", features, persistent=False)
        self.embedding = nn.Parameter(torch.randn(features.shape[1], dim) * (0.0 if given else 0.02))
        self.head = nn.Parameter(torch.zeros(features.shape[1], dim))

    def weights(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """The summed weights, by parameter name."""
        return {
            "tok_embeddings.weight": model.tok_embeddings.weight + self.features @ self.embedding,
            "output.weight": model.output.weight + self.features @ self.head,
        }

    def folded(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """The model's state dict with the sums in place."""
        with torch.no_grad():
            return {key: value.detach().clone() for key, value in {**model.state_dict(), **self.weights(model)}.items()}
