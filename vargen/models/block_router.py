"""A router of video drafts: predicts from what the drafter computed how much better the target's block would be.

Nothing is decoded and no scorer runs. The prediction is linear in a few statistics of a block, so that it can be fitted in
closed form to some hundred pairs.

Shape suffixes: S denoising steps, H drafts, F latent frames of a block, C latent channels, Y/X rows and columns, D statistics.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from vargen.compat import ensure_torchvision

ensure_torchvision()

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

_LEAST = 1e-6  # added to mean squares before their logarithm
RANKS = 101  # predicted gains at equal shares of the training pairs: what a share of the drafts is measured with


def describe_draft(estimates_SHFCYX: Tensor, previous_HFCYX: Tensor, number: int) -> Tensor:
    """Return statistics of drafts, float32 `[H, D]`.

    They are logarithms of mean squares (how much each step changed the estimate, and all of them; the jump from the last
    finished frame; the motion within the draft and within the block before it; the change of their mean frame), mean and
    deviation of each channel in both blocks, and the number of the block.

    Args:
        estimates_SHFCYX: clean estimates of the drafts after each step; the last one is the draft. previous_HFCYX: the
            finished blocks before them. number: of the block.
    """
    estimates, previous = estimates_SHFCYX.float(), previous_HFCYX.float()
    draft = estimates[-1]

    def magnitude(difference: Tensor) -> Tensor:
        return (difference.flatten(1).square().sum(1) / max(1, difference[0].numel()) + _LEAST).log()  # also of no frames

    changes = [magnitude(after - before) for before, after in pairwise(estimates)]
    jump, drift = draft[:, 0] - previous[:, -1], draft.mean(1) - previous.mean(1)
    changes += [magnitude(draft - estimates[0]), magnitude(jump), magnitude(draft.diff(dim=1)), magnitude(previous.diff(dim=1))]
    changes.append(magnitude(drift))
    parts = [torch.stack(changes, 1)]
    for block in (draft, previous):
        parts += [block.mean((1, 3, 4)), block.std((1, 3, 4))]
    return torch.cat([*parts, torch.full_like(parts[0][:, :1], float(number))], 1)


class BlockRouter(ModelMixin, ConfigMixin):
    """Ranks drafts by how much the target would gain over them.

    Args:
        steps: denoising steps of a draft. channels: C.
        drafter: digest of the network that makes the drafts, which `validate_drafter` compares.
        exit_step: None if a small model drafts; otherwise the draft is the target's estimate after this many steps.
    """

    @register_to_config
    def __init__(self, steps: int = 4, channels: int = 4, drafter: str = "", exit_step: int | None = None):
        super().__init__()
        count = steps - 1 + 5 + 4 * channels + 1
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("scale", torch.ones(count))
        self.gain = nn.Linear(count, 1)
        self.register_buffer("ranks", torch.linspace(-1, 1, RANKS))

    def predict_gain(self, statistics_HD: Tensor) -> Tensor:
        """Return the predicted score of the target's block minus that of the draft, float32 `[H]`."""
        return self.gain((statistics_HD - self.mean) / self.scale)[:, 0]

    def forward(self, estimates_SHFCYX: Tensor, previous_HFCYX: Tensor, number: int) -> Tensor:
        """Return for each draft the share of the training drafts from which the target would gain less, `[H]` in [0, 1].

        Arguments as in `describe_draft`.
        """
        gain = self.predict_gain(describe_draft(estimates_SHFCYX, previous_HFCYX, number).to(self.mean))
        return torch.searchsorted(self.ranks, gain).clamp(max=RANKS - 1) / (RANKS - 1)

    def validate_drafter(self, drafter: str, exit_step: int) -> None:
        """Raise ValueError unless drafts are made by the network with the digest `drafter` and this `exit_step` (0: none)."""
        if exit_step != (self.config.exit_step or 0):
            raise ValueError(f"the router is for exit_step {self.config.exit_step or 0}, the method has {exit_step}")
        if drafter != self.config.drafter:
            raise ValueError(
                f"the router is for drafts of the network {self.config.drafter!r}, not of {drafter!r}: train it again with "
                "`vargen train router`"
            )
