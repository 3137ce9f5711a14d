"""Plain torch references of the kernels, in any float dtype, against which tests compare the kernels.

The references are slow, and share no code with the kernels: they follow the parents of a tree instead of packed words, sort to
filter, and process one image and one draft at a time. On a CPU the library uses other implementations (`attention`,
`to_probs`, the rules of `vargen.decoding.rules`), which are tested against the same references.

Shape suffixes: R rows, B images, T tokens of the pass, H query heads, G key heads, S slots, K head width, P prefix slots, A
slots of a path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ancestors_of(parents: Sequence[int], slot: int) -> set[int]:
    """Return the slot and its ancestors."""
    found = set()
    while slot >= 0:
        found.add(slot)
        slot = parents[slot]
    return found


def tree_attention(
    q_RTHK: Tensor,
    k_RGSK: Tensor,
    v_RGSK: Tensor,
    length_R: Tensor,
    prefix_bias_RP: Tensor,
    parents: Sequence[Sequence[int]],
    earlier: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention `[R, T, H, K]`, computed query by query. A query without visible keys gets zeros.

    Args:
        parents: for each row, the parent of each fed token in the tree, -1 for a root; `earlier` tokens come first.
    """
    R, T, H, K = q_RTHK.shape
    G, P = k_RGSK.shape[1], prefix_bias_RP.shape[1]
    out = torch.zeros(R, T, H, K, dtype=dtype)
    for row in range(R):
        base = P + int(length_R[row])
        for t in range(T):
            seen = [*range(base), *(base + slot for slot in sorted(ancestors_of(parents[row], earlier + t)))]
            seen = [slot for slot in seen if slot < k_RGSK.shape[2]]
            bias = torch.zeros(len(seen), dtype=dtype)
            for index, slot in enumerate(seen):
                if slot < P:
                    bias[index] = prefix_bias_RP[row, slot]
            for head in range(H):
                k, v = (each[row, head // (H // G), seen].to(dtype) for each in (k_RGSK, v_RGSK))
                scores = k @ q_RTHK[row, t, head].to(dtype) * K**-0.5 + bias
                if len(seen) and scores.max() > -torch.inf:
                    out[row, t, head] = scores.softmax(0) @ v
    return out


def probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Probabilities `[rows, V]` by sorting each row: temperature, top-k, top-p, softmax, as in `to_probs`.

    Top-k keeps all values equal to the k-th largest. Top-p keeps the most probable of the k largest (exactly k) up to and
    including the one at which their sum exceeds p, and all values equal to that one. NaN and infinite logits count as -inf; a
    row without finite logits gets zeros.
    """
    out = torch.zeros(logits.shape, dtype=dtype)
    for row, z in enumerate(logits.to(dtype)):
        z = z / temperature
        z = torch.where(z.isfinite(), z, -torch.inf)
        if not z.isfinite().any():
            continue
        kept = min(top_k or len(z), len(z))
        order = z.sort(descending=True).values[:kept]
        least = order[-1]
        if top_p < 1:
            crossing = int((order.softmax(0).cumsum(0) <= top_p).sum())
            least = order[min(crossing, kept - 1)]
        out[row] = torch.where(z < least, -torch.inf, z).softmax(0)
    return out


def compact_path(k_LRGSK: Tensor, first_R: Sequence[int], path: Sequence[Sequence[int]]) -> Tensor:
    """Return a copy of keys or values with the tokens of each row's path moved to consecutive slots from `first` on.

    The path has offsets from slot `first`. Offsets past the last slot are not moved.
    """
    out = k_LRGSK.clone()
    last = k_LRGSK.shape[3] - 1
    for row, slots in enumerate(path):
        for place, slot in enumerate(slots):
            if first_R[row] + slot <= last:
                out[:, row, :, first_R[row] + place] = k_LRGSK[:, row, :, first_R[row] + slot]
    return out


def exponential(u: Tensor) -> Tensor:
    """-log(1 - u) of float32 u in (0, 1), as a fixed sequence of IEEE operations that gives the same bits on every device.

    With 1 - u = m 2^e, m in [0.75, 1.5), and s = (m - 1) / (m + 1), the result is -e log 2 - 2 atanh(s), with six terms of the
    series of atanh. `vargen.decoding.noise.sample_exponential` uses torch's logarithm, which is several times faster on a CPU
    and differs by at most 3 units in the last place.
    """
    rest, near = 1.0 - u, u < 0.25  # near: m equals 1 - u, so m - 1 is -u without rounding
    exponent = torch.where(near, 0, (rest.view(torch.int32) - 0x3F400000) >> 23)
    m = (rest.view(torch.int32) - (exponent << 23)).view(torch.float32)
    f = torch.where(near, -u, m - 1.0)
    lost = torch.where(near, 0.0, ((1.0 - rest) - u) / rest)
    s = f / (f + 2.0)
    z = s * s
    series = torch.zeros_like(z)
    for term in (13, 11, 9, 7, 5, 3):
        series = z * (torch.tensor(2.0 / term, dtype=torch.float32, device=u.device) + series)
    e = exponent.to(torch.float32)
    small = s * (series - f) + (e * 1.4286068203094172e-06 + lost)
    return -((small + f) + e * 0.693145751953125)
