"""What a generator's training adds to the next-token loss: dropped captions, noise, weights of starts, shared weights."""

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


def noisy(tokens_BN: Tensor, most: float, wrong_starts: float = 0.0, captioned: Tensor | None = None) -> Tensor:
    """Input tokens of which some are those of other pictures of the batch, at the same places.

    Generated images hold errors that real ones lack. A model that has seen none goes on with whatever picture begins so; one
    that has leans less on the tokens so far, and more on the caption.

    Args:
        most: the share of scattered ones is uniform from 0 to this for each picture.
        wrong_starts: share of pictures whose tokens up to a random place are all another picture's.
        captioned: bool `[B]`; only these get wrong starts, as nothing tells the others what to return to. Default: all.
    """
    (B, N), device = tokens_BN.shape, tokens_BN.device
    scattered = torch.rand(B, N, device=device) < torch.rand(B, 1, device=device) * most
    started = torch.rand(B, device=device) < wrong_starts
    if captioned is not None:
        started &= captioned.to(device)
    before = torch.arange(N, device=device) < torch.rand(B, 1, device=device) * N
    one = torch.randint(1, max(B, 2), (B, 1), device=device).expand(B, N)
    each = torch.randint(1, max(B, 2), (B, N), device=device)
    from_start = started[:, None] & before
    donors = (torch.arange(B, device=device)[:, None] + torch.where(from_start, one, each)) % B
    return torch.where(scattered | from_start, tokens_BN.gather(0, donors), tokens_BN)


class NearNoise:
    """Replaces input tokens by codes like theirs, as drawing does: a sample is seldom far off and often beside the mark.

    Weights that had seen only far-off noise had 86 % of the next tokens right behind near misses in three places of ten.

    Args:
        codes_VE: the codebook, rows of unit norm. most: the share of replaced tokens is uniform from 0 to this per picture.
        neighbours: how many codes are near.
    """

    def __init__(self, codes_VE: Tensor, most: float, neighbours: int = 8):
        self.most = most
        count = min(neighbours + 1, len(codes_VE))
        self.table = torch.cat([(part @ codes_VE.T).topk(count, -1).indices[:, 1:] for part in codes_VE.split(1024)])

    def __call__(self, tokens_BN: Tensor) -> Tensor:
        (B, N), device = tokens_BN.shape, tokens_BN.device
        replaced = torch.rand(B, N, device=device) < torch.rand(B, 1, device=device) * self.most
        which = torch.randint(self.table.shape[1], (B, N, 1), device=device)
        return torch.where(replaced, self.table[tokens_BN].gather(-1, which).squeeze(-1), tokens_BN)


def start_weights(tokens_BN: Tensor, blank: int, most: float) -> Tensor:
    """How much each token counts in the loss, float32 `[B, N]`.

    It is `most` until the picture begins; from there on, what is beyond 1 halves every eight tokens that are not blank.

    Where and with what a picture begins is told by the caption alone, and is 1 % of its tokens; what follows is read off them.
    Of drawn pictures, 43 % began with the right token, and from there on as many tokens were right, to the last row.
    """
    shown = tokens_BN != blank
    before = shown.cumsum(1) - shown.long()
    return 1 + (most - 1) * 0.5 ** (before / 8)


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
