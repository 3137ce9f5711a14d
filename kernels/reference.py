"""What each kernel computes, written plainly in torch: the definition that tests hold the kernels to, in any float dtype.

Nothing here is fast, and nothing is shared with the kernels: trees are walked by their parents, not by packed words, filters
sort, and rules go image by image and draft by draft. On a CPU the library takes paths of its own (`few_queries`, `to_probs`,
the rules of `vargen.decoding.next_token.acceptance`), which tests hold to the same.

Shape suffixes: R rows, B images, T tokens of the pass, H query heads, G key heads, S slots, K head width, P prefix slots, A
slots of a path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def lineage(parents: Sequence[int], slot: int) -> set[int]:
    """The slot and its ancestors."""
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
    start_R: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention `[R, T, H, K]`, query by query; a query that sees nothing gets zeros.

    Args:
        parents: of each row, the tree that its fed tokens make, `earlier` ones first; -1 for a root.
    """
    R, T, H, K = q_RTHK.shape
    G, P = k_RGSK.shape[1], prefix_bias_RP.shape[1]
    out = torch.zeros(R, T, H, K, dtype=dtype)
    for row in range(R):
        base = P + int(length_R[row])
        for t in range(T):
            seen = [*range(base), *(base + slot for slot in sorted(lineage(parents[row], earlier + t)))]
            low = 0 if start_R is None else int(start_R[row])
            seen = [slot for slot in seen if low <= slot < k_RGSK.shape[2]]
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
    unconditional: Tensor | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`[rows, V]`, row by row by sorting: guidance, temperature, top-k, top-p, softmax, as `to_probs` has them.

    Ties at the k-th value all stay. Of the k largest (exactly k), the most probable are kept until their sum exceeds p, the
    crossing one included, and whatever equals the last of these. NaN and infinities count as -inf; a row of
    nothing else gets zeros.
    """
    out = torch.zeros(logits.shape, dtype=dtype)
    for row, z in enumerate(logits.to(dtype)):
        if unconditional is not None:
            u = unconditional[row].to(dtype)
            z = u + scale * (z - u)
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


def kept_path(k_LRGSK: Tensor, first_R: Sequence[int], path: Sequence[Sequence[int]]) -> Tensor:
    """A copy of keys or values in which the tokens of each row's path, given by their place behind slot `first`, lie one after
    the other from there on; what lies past the last slot is not moved."""
    out = k_LRGSK.clone()
    last = k_LRGSK.shape[3] - 1
    for row, slots in enumerate(path):
        for place, slot in enumerate(slots):
            if first_R[row] + slot <= last:
                out[:, row, :, first_R[row] + place] = k_LRGSK[:, row, :, first_R[row] + slot]
    return out


def exponential(u: Tensor) -> Tensor:
    """-log(1 - u) of float32 u in (0, 1), by a fixed sequence of IEEE operations: the same bits on every device.

    With 1 - u = m 2^e, m within [0.75, 1.5), and s = (m - 1) / (m + 1), it is -e log 2 - 2 atanh(s), the latter by six terms of
    its series. `vargen.decoding.noise.exponential` uses torch's own logarithm, several times as fast on a CPU, which lies
    within 3 units in the last place.
    """
    rest, near = 1.0 - u, u < 0.25  # where m is 1 - u itself, and m - 1 is -u without rounding
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
