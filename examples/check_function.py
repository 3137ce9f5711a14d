"""Prove that a function which verifies drafts is exact: every draft and every outcome of its uniforms is summed.

python examples/check_function.py

The function is plain Python or NumPy, and is run many times. Each comparison of a uniform with a number has two outcomes, with
the probabilities that the number implies, and every sequence of outcomes is run once.

Shape suffixes: S draft tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np


def verify(p, q, drafts, uniforms):
    """Speculative sampling (Leviathan et al. 2023) for one image."""
    for slot, token in enumerate(drafts):
        if uniforms[slot] * q[slot, token] >= p[slot, token]:  # rejected
            residual = np.maximum(p[slot] - q[slot], 0)
            return [*drafts[:slot], np.searchsorted(np.cumsum(residual / residual.sum()), uniforms[-1])]
    return [*drafts, np.searchsorted(np.cumsum(p[-1]), uniforms[-1])]


R = TypeVar("R")
_ROUNDING = 1e-12  # probabilities closer to 0 or 1 are rounding, as of a cumulative sum that ends below 1
VerifyFunction = Callable[[np.ndarray, np.ndarray, Sequence[int], Sequence["Uniform"]], Sequence[int]]


class Uniform:
    """A uniform on [0, 1) that may be multiplied by a number above 0 and compared with one, also by `numpy.searchsorted`."""

    __array_ufunc__ = None  # NumPy leaves comparisons to this class

    def __init__(self, path: _Path, factor: float = 1.0, whole: Uniform | None = None):
        self._path, self._factor, self._whole = path, factor, whole or self
        self.low, self.high = 0.0, 1.0  # the interval that this uniform is known to lie in

    def __lt__(self, other: Any) -> bool:
        if other is self:  # numpy.searchsorted asks
            return False
        bound = float(other) / self._factor if self._factor > 0 else float(other > 0)
        return self._path.compare(self._whole, bound)

    def __gt__(self, other: Any) -> bool:
        return not self < other

    __le__, __ge__ = __lt__, __gt__

    def __mul__(self, other: Any) -> Uniform:
        return Uniform(self._path, self._factor * float(other), self._whole)

    __rmul__ = __mul__

    def __float__(self) -> float:
        raise TypeError(
            "a uniform can only be multiplied by a number and compared with one, so that its outcomes can be summed"
        )


class _Path:
    """One sequence of outcomes of all comparisons, in the order of a run."""

    def __init__(self, decided: Sequence[bool]):
        self.decided, self.outcomes, self.weight = decided, list[bool](), 1.0
        self.open: list[int] = []  # comparisons of which both outcomes are possible

    def compare(self, uniform: Uniform, bound: float) -> bool:
        share = min(max((bound - uniform.low) / (uniform.high - uniform.low), 0.0), 1.0)
        share = 0.0 if share < _ROUNDING else 1.0 if share > 1 - _ROUNDING else share
        number = len(self.outcomes)
        if 0 < share < 1:
            self.open.append(number)
        outcome = self.decided[number] if number < len(self.decided) else share == 1.0
        self.outcomes.append(outcome)
        self.weight *= share if outcome else 1 - share
        uniform.low, uniform.high = (
            (uniform.low, min(bound, uniform.high)) if outcome else (max(bound, uniform.low), uniform.high)
        )
        return outcome


def enumerate_outcomes(run: Callable[[list[Uniform]], R], count: int) -> Iterator[tuple[float, R]]:
    """Run a function with all outcomes of `count` independent uniforms; yield the probability and the result of each."""
    waiting: list[list[bool]] = [[]]
    while waiting:
        decided = waiting.pop()
        path = _Path(decided)
        result = run([Uniform(path) for _ in range(count)])
        waiting += [[*path.outcomes[:n], not path.outcomes[n]] for n in path.open if n >= len(decided)]
        yield path.weight, result


def sum_function(verify: VerifyFunction, *, vocab: int = 3, drafts: int = 2, seed: int = 0) -> float:
    """Return the total variation distance between what a function commits and the target; 0 if it is exact.

    The target and the drafter are random tables of probabilities. What the function commits is continued by the target.

    Args:
        verify: `verify(p, q, drafts, uniforms)` with p `[S + 1, V]`, the target's probabilities after each draft token; q
            `[S, V]`, those that each draft token was sampled from; S draft tokens; and S + 1 uniforms, the last
            one for the token after the draft. Returns the committed tokens: accepted draft tokens, then one more.
        vocab, drafts: V and S.
        seed: of the tables.
    """
    generator, V, S = np.random.default_rng(seed), vocab, drafts
    prefixes = [prefix for length in range(S + 1) for prefix in itertools.product(range(V), repeat=length)]
    p, q = ({prefix: generator.dirichlet(np.ones(V)) for prefix in prefixes} for _ in range(2))
    committed: dict[tuple[int, ...], float] = {}
    for draft in itertools.product(range(V), repeat=S):
        q_rows = np.stack([q[draft[:slot]] for slot in range(S)])
        p_rows = np.stack([p[draft[:slot]] for slot in range(S + 1)])
        probability = float(np.prod(q_rows[range(S), draft]))

        def run(uniforms: list[Uniform], p_rows: Any = p_rows, q_rows: Any = q_rows, draft: Any = draft) -> tuple[int, ...]:
            return tuple(int(token) for token in verify(p_rows, q_rows, draft, uniforms))

        for weight, tokens in enumerate_outcomes(run, S + 1):
            if not 1 <= len(tokens) <= S + 1 or not all(0 <= token < V for token in tokens):
                raise ValueError(f"verify must return 1 to {S + 1} tokens from 0 to {V - 1}, got {tokens}")
            committed[tokens] = committed.get(tokens, 0.0) + probability * weight
    distance = 0.0
    for image in itertools.product(range(V), repeat=S + 1):
        rest = [float(np.prod([p[image[:n]][image[n]] for n in range(start, S + 1)])) for start in range(S + 2)]
        found = sum(committed.get(image[:n], 0.0) * rest[n] for n in range(1, S + 2))
        distance += abs(found - rest[0]) / 2
    return distance


if __name__ == "__main__":
    print(f"total variation distance to the target: {sum_function(verify):.1e}")
