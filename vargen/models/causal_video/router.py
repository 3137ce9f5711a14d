"""A router of video drafts: predicts from what the drafter computed how much better the target's block would be.

Nothing is decoded and no scorer runs. The prediction is linear in a few statistics of a block, so that it can be fitted in
closed form to some hundred pairs.

Shape suffixes: H drafts, F latent frames of a block, C latent channels, Y/X rows and columns, D statistics.
"""

from __future__ import annotations

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from vargen.models.storage import QuantizedStorageMixin

_REGIONS, _CHANGES = 4, 8  # regions along a side of the mean frame; other statistics
_LEAST = 1e-6  # added to mean squares before their logarithm
RANKS = 101  # predicted gains at equal shares of the training pairs: what a share of the drafts is measured with


def describe_draft(draft_HFCYX: Tensor, previous_HFCYX: Tensor, first_HFCYX: Tensor, number: int) -> Tensor:
    """Return statistics of drafts, float32 `[H, D]`.

    They are the mean frame of the draft and of the first block, averaged over 4 x 4 regions; logarithms of mean squares, namely
    the drift of the mean frame from the first block, of the draft and of the previous block, their sharpness relative to the
    first block and to each other, the sharpness of the first block, and the motion relative to it; and the number of the block.

    Args:
        draft_HFCYX: clean latents of the drafts. previous_HFCYX: the finished blocks before them. first_HFCYX: those at the
            start of the videos, which the target made. number: of the block.
    """
    draft, previous, first = draft_HFCYX.float(), previous_HFCYX.float(), first_HFCYX.float()
    shown, before, start = (block.mean(1) for block in (draft, previous, first))
    sharp, sharp_before, sharp_start = (_sharpness(block) for block in (draft, previous, first))
    changes = [
        _magnitude(shown - start), _magnitude(before - start), sharp - sharp_start, sharp_before - sharp_start,
        sharp - sharp_before, sharp_start, _magnitude(draft.diff(dim=1)) - _magnitude(first.diff(dim=1)),
        torch.full_like(sharp, float(number)),
    ]  # fmt: skip
    regions = [adaptive_avg_pool2d(frame, _REGIONS).flatten(1) for frame in (shown, start)]
    return torch.cat([*regions, torch.stack(changes, 1)], 1)


def _sharpness(block_HFCYX: Tensor) -> Tensor:
    return _magnitude(block_HFCYX.diff(dim=-1)) + _magnitude(block_HFCYX.diff(dim=-2))


def _magnitude(difference: Tensor) -> Tensor:
    """Return the logarithm of the mean square of each row; also of rows without values."""
    return (difference.flatten(1).square().sum(1) / max(1, difference[0].numel()) + _LEAST).log()


class BlockRouter(QuantizedStorageMixin, ConfigMixin):
    """Ranks drafts by how much the target would gain over them.

    Args:
        channels: C.
        drafter: digest of the network that makes the drafts, which `validate_drafter` compares.
        exit_step: None if a small model drafts; otherwise the draft is the target's estimate after this many steps.
    """

    @register_to_config
    def __init__(self, channels: int = 4, drafter: str = "", exit_step: int | None = None):
        super().__init__()
        count = 2 * channels * _REGIONS**2 + _CHANGES
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("scale", torch.ones(count))
        self.gain = nn.Linear(count, 1)
        self.register_buffer("ranks", torch.linspace(-1, 1, RANKS))

    def predict_gain(self, statistics_HD: Tensor) -> Tensor:
        """Return the predicted score of the target's block minus that of the draft, float32 `[H]`."""
        return self.gain((statistics_HD - self.mean) / self.scale)[:, 0]

    def forward(self, draft_HFCYX: Tensor, previous_HFCYX: Tensor, first_HFCYX: Tensor, number: int) -> Tensor:
        """Return for each draft the share of the training drafts from which the target would gain less, `[H]` in [0, 1].

        Arguments as in `describe_draft`.
        """
        gain = self.predict_gain(describe_draft(draft_HFCYX, previous_HFCYX, first_HFCYX, number).to(self.mean))
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
