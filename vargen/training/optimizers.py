"""Muon: momentum, orthogonalized before the update (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982).

torch.optim.Muon iterates in bfloat16, one matrix at a time; on CPUs without bfloat16 instructions a product is eight times
slower than in float32. Here matrices of equal shape share one batched iteration, in bfloat16 only with hardware support.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vargen.device import preferred_dtype

# Quintic Newton-Schulz coefficients of Jordan et al.: singular values converge to about [0.7, 1.2] in five iterations.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Approximately orthogonalize matrices `[n, a, b]`: singular values near 1, with the same singular vectors."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(preferred_dtype(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters.

    Args:
        params: matrices; fused ones (queries, keys, values) are split into squares.
        lr: learning rate on AdamW's scale: updates are scaled to AdamW's typical root mean square of 0.2 (Liu et al., eq. 4).
        momentum: Nesterov momentum. weight_decay: decoupled.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            pieces: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                for part, target in zip(_squares(update), _squares(parameter), strict=True):
                    pieces[tuple(part.shape)].append((part, target))
            for (rows, columns), pairs in pieces.items():
                updates = orthogonalize(torch.stack([part for part, _ in pairs]))
                scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
                for update, (_, target) in zip(updates, pairs, strict=True):
                    target.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def _squares(matrix: Tensor) -> list[Tensor]:
    rows, columns = matrix.shape
    return list(matrix.split(columns)) if rows > columns and rows % columns == 0 else [matrix]


def split_optimizers(
    parameters: Mapping[str, Tensor], in_blocks: Callable[[str], bool], config: Any
) -> list[torch.optim.Optimizer]:
    """Create the optimizers: Muon for the matrices of the blocks, AdamW for all other parameters.

    Args:
        parameters: by name. in_blocks: whether a parameter of this name belongs to a block.
        config: has `schedule`, `weight_decay` (of Muon), `adamw_learning_rate`, `adamw_beta2`, and `optimizer`: with "adamw",
            AdamW trains all parameters.
    """
    muon = getattr(config, "optimizer", "muon") == "muon"
    matrices = {name: p for name, p in parameters.items() if muon and in_blocks(name) and p.dim() == 2}
    rest = [p for name, p in parameters.items() if name not in matrices]
    betas = (0.9, config.adamw_beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.adamw_learning_rate, betas=betas, weight_decay=0.0, fused=True)
    ]
    if matrices:
        optimizers.insert(0, Muon(matrices.values(), lr=config.schedule.learning_rate, weight_decay=config.weight_decay))
    return optimizers
