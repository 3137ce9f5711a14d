"""Windows of Jacobi drafting that differ from image to image: where more draft tokens are accepted, more are drafted.

In a batch of many images, a pass is bound by arithmetic, and each token that it feeds costs the same in every row. The policy
splits a budget of tokens per pass: B times the window that another policy selects, such as `AutoWindow` from pass costs.

Shape suffixes: B images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding.next_token.draft_length import WINDOWS, FixedWindow, WindowState, parse_window
from vargen.decoding.next_token.protocols import TokenModel

_EXPONENT = 0.75  # of the tokens that a window commits, as in `PowerLawEstimate`
_SPLIT = 0.5  # windows grow with this power of the acceptance: more reacts to chance, and discards refined draft tokens
_PRIOR_RATE = 0.45  # s of the packaged model with `gumbel`
_PRIOR_PASSES = 4.0  # passes whose weight the prior has
_DECAY = 0.95  # weight of the past of an image
_MIN_WINDOW = 4


class RowWindows:
    """State of B images: their recent acceptance, and the windows that follow from it.

    Args:
        budget: selects the window by which the budget is counted.
        images: B.
        max_width: most tokens fed to an image.
        is_shared_out: whether the windows of all images always add up to the budget, and so depend on each other.

    Attributes:
        widths: int64 `[B]`, tokens that the next pass feeds to each image, root included.
    """

    is_shared: ClassVar[bool] = True  # see `rows.insert_rows`; its rows are restarted

    def __init__(self, budget: WindowState, images: int, max_width: int, is_shared_out: bool):
        self.budget, self.max_width, self.is_shared_out = budget, max_width, is_shared_out
        self._rate_sum, self._weight = torch.zeros(images, dtype=torch.float32), torch.zeros(images, dtype=torch.float32)
        self._active = torch.ones(images, dtype=torch.bool)
        self.widths = torch.ones(images, dtype=torch.int64)

    def restart(self, rows: Tensor) -> None:
        """Forget the past of rows int64 `[n]`, in which other images begin."""
        self._rate_sum[rows], self._weight[rows], self._active[rows] = 0.0, 0.0, True

    def choose_width(self) -> int:
        """Select `widths`, and return the widest."""
        width = self.budget.choose_width()
        rates = (self._rate_sum + _PRIOR_PASSES * _PRIOR_RATE) / (self._weight + _PRIOR_PASSES)
        shares = (rates / _PRIOR_RATE) ** _SPLIT
        if self.is_shared_out and self._active.any():
            shares = shares / shares[self._active].mean()
        least = min(width, _MIN_WINDOW)
        self.widths = (1 + (width - 1) * shares).round().long().clamp(least, max(self.max_width if width > 1 else 1, least))
        return int(self.widths[self._active].max()) if self._active.any() else width

    def observe(self, num_committed: Tensor, active: Tensor) -> None:
        """Update with the number of tokens committed, int64 `[B]`, and which images are unfinished, bool `[B]`."""
        self.budget.observe(num_committed, active)
        drafted = active & (self.widths > 1)
        rates = (num_committed - 1) / (self.widths - 1).clamp(min=1) ** _EXPONENT
        self._rate_sum = torch.where(drafted, _DECAY * self._rate_sum + rates, self._rate_sum)
        self._weight = torch.where(drafted, _DECAY * self._weight + 1, self._weight)
        self._active = active


@dataclass(frozen=True)
class RowWindow:
    """A window for each image that follows the acceptance of its own drafts.

    With a number, the window of an image depends on the past of this image alone, so that images are reproducible, and the same
    in any batch. With `"auto"`, the windows of a batch add up to B times the window that `AutoWindow` selects from measured
    pass costs; what is said there of reproducible images applies. On a GPU, all images have the same window.

    It saves time only for models that feed no more than that (`TokenModel.forward_packed`).

    Args:
        window: tokens fed to an image of ordinary acceptance, at least 2, or `"auto"`.
    """

    window: int | str = "auto"
    fits_any_grid: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        parse_window(self.window)

    @property
    def max_width(self) -> int:
        """Most tokens fed to an image: twice the window, because images differ by less."""
        width = parse_window(self.window).max_width
        return width if self.window == "auto" else 2 * width

    def start(self, model: TokenModel, condition: Any, images: int) -> WindowState:
        """Return the state of B new images."""
        tokens = model.grid[0] * model.grid[1]
        budget = parse_window(self.window).start(model, condition, images)
        if isinstance(budget, FixedWindow):
            budget = FixedWindow(min(budget.max_width, tokens))
        if model.device.type != "cpu":
            return budget
        return RowWindows(budget, images, min(self.max_width, tokens), self.window == "auto")


WINDOWS["rows"] = RowWindow()
