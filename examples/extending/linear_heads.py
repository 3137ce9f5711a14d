"""A trained drafter: one linear layer predicts several tokens ahead, with the interface of `MedusaDrafter`.

`forward` takes features and token embeddings `[R, T, D]`, where R is B, or 2 B with guidance, and returns features
`[R, T, heads, D]`, which the model's own output layer turns into logits.
"""

from dataclasses import dataclass, replace

import torch

from vargen.decoding import Medusa
from vargen.models.heads.decoding import MedusaHeads
from vargen.pipelines.families import Component, register_family
from vargen.pipelines.llamagen import LLAMAGEN

# isort: split
from diffusers import ConfigMixin, ModelMixin  # after vargen; diffusers looks for ModelMixin in the module of a component
from diffusers.configuration_utils import register_to_config


class LinearDrafter(ModelMixin, ConfigMixin):
    """Predicts the features of the next tokens from the target's feature and the token that was sampled from it."""

    target_settings = ("dim", "vocab_size", "grid_size")  # copied from the target by `vargen train drafter`
    trains_features = False  # the loss compares probabilities only

    @register_to_config
    def __init__(self, dim: int = 768, vocab_size: int = 16384, grid_size: int = 16, heads: int = 2):
        super().__init__()
        self.linear = torch.nn.Linear(2 * dim, heads * dim)
        self.register_buffer("feature_scale", torch.ones(dim))  # measured when training begins
        self.register_buffer("token_scale", torch.ones(()))

    def forward(self, features, embeddings):
        inputs = torch.cat([features / self.feature_scale, embeddings / self.token_scale], dim=-1)
        outputs = self.linear(inputs.to(self.dtype)).unflatten(-1, (self.config.heads, -1))
        return outputs * self.feature_scale


@dataclass(frozen=True)
class LinearHeads(Medusa):
    """Drafts with a `LinearDrafter`."""

    kind = "linear"  # name of the component


LINEAR = Component(
    (LinearDrafter,),
    follows_dtype=True,
    matches=("dim", "vocab_size", "grid_size"),
    adapter=MedusaHeads,
    drafter=LinearHeads,
    run_folder="drafter",
)
register_family(replace(LLAMAGEN, components={**LLAMAGEN.components, "linear": LINEAR}))
