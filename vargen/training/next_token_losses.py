"""The next-token loss: cross-entropy without all logits in memory, caption dropout, input noise, and shared weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer

_ROWS = 1024  # rows of logits held at a time: with 4096 codes they fit a CPU's cache


def drop_captions(condition: Condition, model: LlamaGenTransformer, dropped: Tensor) -> Condition:
    """Replace captions by the null caption where `dropped [B]` is True, keeping the row's mask, as CFG does at inference."""
    null = model.null_condition(condition)
    assert condition.caption_embeds is not None and null.caption_embeds is not None
    embeds = torch.where(dropped[:, None, None].to(model.device), null.caption_embeds, condition.caption_embeds)
    return Condition(caption_embeds=embeds, caption_mask=condition.caption_mask)


def corrupt_tokens(tokens_BN: Tensor, max_noise: float, wrong_prefix: float = 0.0, captioned: Tensor | None = None) -> Tensor:
    """Replace some input tokens by those of other images in the batch, at the same positions.

    Generated images contain errors that real ones lack. A model trained without errors continues any image that starts like one
    it has seen; with errors it relies less on earlier tokens and more on the caption.

    Args:
        max_noise: the share of scattered replacements is uniform from 0 to this, per image.
        wrong_prefix: probability that all tokens of an image up to a random position come from one other image.
        captioned: bool `[B]`; only these get wrong prefixes, because without a caption nothing indicates the correct
            continuation. Default: all.
    """
    (B, N), device = tokens_BN.shape, tokens_BN.device
    scattered = torch.rand(B, N, device=device) < torch.rand(B, 1, device=device) * max_noise
    prefixed = torch.rand(B, device=device) < wrong_prefix
    if captioned is not None:
        prefixed &= captioned.to(device)
    before = torch.arange(N, device=device) < torch.rand(B, 1, device=device) * N
    one = torch.randint(1, max(B, 2), (B, 1), device=device).expand(B, N)
    several = torch.randint(1, max(B, 2), (B, N), device=device)
    in_prefix = prefixed[:, None] & before
    donors = (torch.arange(B, device=device)[:, None] + torch.where(in_prefix, one, several)) % B
    return torch.where(scattered | in_prefix, tokens_BN.gather(0, donors), tokens_BN)


class NeighborNoise:
    """Replaces input tokens by similar codes, as in generation, where a token is rarely far off but often a near miss.

    Weights trained only with unrelated replacements predicted 86 % of the next tokens correctly when 30 % of the input tokens
    were near misses.

    Args:
        codes_VE: the codebook, rows of unit norm. max_noise: the share of replaced tokens is uniform from 0 to this, per image.
        neighbors: number of nearest codes to choose from.
    """

    def __init__(self, codes_VE: Tensor, max_noise: float, neighbors: int = 8):
        self.max_noise = max_noise
        count = min(neighbors + 1, len(codes_VE))
        self.table = torch.cat([(part @ codes_VE.T).topk(count, -1).indices[:, 1:] for part in codes_VE.split(1024)])

    def __call__(self, tokens_BN: Tensor) -> Tensor:
        (B, N), device = tokens_BN.shape, tokens_BN.device
        replaced = torch.rand(B, N, device=device) < torch.rand(B, 1, device=device) * self.max_noise
        which = torch.randint(self.table.shape[1], (B, N, 1), device=device)
        return torch.where(replaced, self.table[tokens_BN].gather(-1, which).squeeze(-1), tokens_BN)


def first_token_weights(tokens_BN: Tensor, blank: int, weight: float) -> Tensor:
    """Return the loss weight of each token, float32 `[B, N]`.

    It is `weight` until the content of the image starts; then its excess over 1 is divided by two every eight tokens that are
    not blank.

    Only the caption determines where the content starts and with which token, which concerns 1 % of the tokens; later tokens
    can be predicted from the earlier ones. Of the generated images, 43 % started with the correct token, and the share of
    correct tokens stayed at that level to the last row.
    """
    shown = tokens_BN != blank
    before = shown.cumsum(1) - shown.long()
    return 1 + (weight - 1) * 0.5 ** (before / 8)


class CodebookPrior(nn.Module):
    """Weights shared by tokens with similar codes, added to the embedding and the head during training.

    A head with rows R phi(c), where phi consists of the code's entries and their products, makes logits a quadratic form in the
    code: similar codes get similar probabilities before each token has been seen often enough to learn its own row. Saving
    folds the sum into plain weights, so the trained model is an ordinary one.

    Args:
        codes_VE: the codebook. dim: width of the model. pretrained: whether the model's weights are already trained; the sums
            then start at zero, so that they do not change the model before the first step.
    """

    def __init__(self, codes_VE: Tensor, dim: int, pretrained: bool = False):
        super().__init__()
        E = codes_VE.shape[1]
        i, j = torch.triu_indices(E, E)
        products = codes_VE[:, i] * codes_VE[:, j]
        features = torch.cat([codes_VE, products], dim=1)
        features = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
        self.register_buffer("features", features, persistent=False)
        self.embedding = nn.Parameter(torch.randn(features.shape[1], dim) * (0.0 if pretrained else 0.02))
        self.head = nn.Parameter(torch.zeros(features.shape[1], dim))

    def weights(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """Return the summed weights, by parameter name."""
        return {
            "tok_embeddings.weight": model.tok_embeddings.weight + self.features @ self.embedding,
            "output.weight": model.output.weight + self.features @ self.head,
        }

    def merge_into(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """Return the model's state dict with the summed weights."""
        with torch.no_grad():
            return {key: value.detach().clone() for key, value in {**model.state_dict(), **self.weights(model)}.items()}


class ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of a linear head, computed a few rows at a time.

    The logits of a full batch would be 140 MB to write and read. The gradient is computed together with the loss, because it
    needs the same logits.
    """

    @staticmethod
    def forward(
        context: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradients.

        Args:
            features: `[n, D]`. weight, bias: of the head.
            targets: int64 `[n]`. weights: float32 `[n]`, per row.
            dtype: of the matrix products.

        Returns:
            The weighted sum, and the cross-entropy of each row `[n]`, which has no gradient.
        """
        low = weight.to(dtype)
        grad_features, losses = torch.empty_like(features), torch.empty_like(weights)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(features), _ROWS):
            part = slice(start, start + _ROWS)
            rows = features[part].to(dtype)
            logits = (rows @ low.T if bias is None else torch.addmm(bias.to(dtype), rows, low.T)).float()
            top = logits.amax(-1, keepdim=True)
            right = logits.gather(-1, targets[part, None])
            probs = logits.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            losses[part] = (total.log() + top - right).squeeze(-1)
            probs.mul_(weights[part, None] / total)
            probs.scatter_add_(-1, targets[part, None], -weights[part, None])
            if grad_bias is not None:
                grad_bias += probs.sum(0)
            probs_low = probs.to(dtype)
            grad_features[part] = (probs_low @ low).to(features.dtype)
            grad_weight += (probs_low.T @ rows).to(weight.dtype)
        context.save_for_backward(grad_features, grad_weight, grad_bias)
        context.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(context: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_features, grad_weight, grad_bias = context.saved_tensors
        return grad_features * grad, grad_weight * grad, None if grad_bias is None else grad_bias * grad, None, None, None


def chunked_cross_entropy(
    weight: Tensor, bias: Tensor | None, features: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross-entropies, and each of them `[B, T]`; see `ChunkedCrossEntropy`.

    Args:
        weight, bias: of the head. features: `[B, T, D]`. targets: `[B, T]`. weights: `[T]`, per position, or `[B, T]`.
    """
    rows = weights.expand(targets.shape).flatten()
    loss, each = ChunkedCrossEntropy.apply(features.flatten(0, 1), weight, bias, targets.flatten(), rows, dtype)
    return loss, each.view(targets.shape)
