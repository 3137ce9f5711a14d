"""A device that is behind: the report of a pass reaches the host while the next pass runs, as on a GPU."""

import pytest
import torch

from vargen.kernels.host import Reports


def delay_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU read the report of a pass one pass late."""
    start = Reports.__init__

    def start_late(self: Reports, device: torch.device) -> None:
        start(self, device)
        self.is_late = True

    monkeypatch.setattr(Reports, "__init__", start_late)
