"""What a generator's training adds to the next-token loss: dropped captions, noise, a plan of the picture, shared weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class Plan(nn.Module):
    """A training loss that asks every position for what is still to be drawn, as a thumbnail of the whole picture.

    A caption tells about 9 of the 500 nats in a picture, most of them at its first few tokens, so next-token loss alone hardly
    asks to read it. Colours and outline of all that is to come, at every position, ask for it everywhere. One linear map of
    the model's features, which is thrown away after training.

    Args:
        dim: width of the features. grid_size: side of the token grid. side: of the thumbnail, which divides the grid's.
    """

    def __init__(self, dim: int, grid_size: int, side: int):
        super().__init__()
        self.side = side
        self.colours = nn.Linear(dim, 3 * side * side)
        last = torch.arange(side).repeat_interleave(side) + 1
        row = torch.arange(grid_size * grid_size) // grid_size  # of the token that a position predicts
        self.register_buffer("to_come", (last[None] * (grid_size // side) > row[:, None]).float(), persistent=False)

    def forward(self, features_BNC: Tensor, pixels: Tensor) -> Tensor:
        """Mean squared error of the colours at the first n positions `[B, n, dim]` of pictures `[B, 3, Y, X]` in [-1, 1].

        Cells drawn already count zero.
        """
        target = F.adaptive_avg_pool2d(pixels, self.side).flatten(2)  # [B, 3, S]
        error = (self.colours(features_BNC).unflatten(-1, (3, -1)) - target[:, None]).square().mean(2)
        return (error * self.to_come[: error.shape[1]]).mean()


class CodePrior(nn.Module):
    """Weights that tokens share by where their codes lie, added to the embedding and the head while training.

    A head of rows R phi(c), with phi the code's entries and their products, makes logits a quadratic form in the code: like
    codes get like probabilities before each token has been seen often enough to learn its own row. Saving folds the sum into
    plain weights, so the trained model is an ordinary one.
    """

    def __init__(self, codes_VE: Tensor, dim: int):
        super().__init__()
        E = codes_VE.shape[1]
        i, j = torch.triu_indices(E, E)
        products = codes_VE[:, i] * codes_VE[:, j]
        features = torch.cat([codes_VE, products], dim=1)
        features = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
        self.register_buffer("features", features, persistent=False)
        self.embedding = nn.Parameter(torch.randn(features.shape[1], dim) * 0.02)
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
