"""The compiled steps of `vargen.kernels.token_steps`: drafting, feeding, sampling with shared noise, and committing tokens.

Sampling is filters, softmax and Gumbel-max of a row at a time. The tokens are those of the torch reference,
`Noise.sample(to_probs(logits, sampling), Purpose.TOKEN)`. Sums and exponentials are rounded otherwise here, so a token is
returned only where a difference of that size could not change it: the sum of top-p up to it is not too close to p, and it wins
by enough. Elsewhere the caller computes the row with the reference. Noise is only computed for tokens that pass the filters.

Shape suffixes: B images, T rows or fed tokens of each, S draft tokens, N tokens of the grid, A path slots, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vargen.kernels.int8.steps import INNER, compiled, exp, f32, f64, i32, i64
from vargen.kernels.int8.vector import LANES, bits_of_float, float_of_bits, keep_vector

MARGIN = 2.0**-16  # relative; rounding errors are about 2^-20, and 2^-18 for exp of very improbable tokens
_ENOUGH = 0.05  # of the mass that top-p keeps: what may be kept at first beyond it
_FAST = {"fastmath": {"nnan", "nsz", "reassoc"}}  # sums in any order
_PART = {**INNER, **_FAST}
_u32, _u64 = np.uint32, np.uint64
_GOLDEN, _LOW1, _LOW2, _ONES = _u32(0x9E3779B9), _u32(0x7FEB352D), _u32(0x846CA68B), _u32(0x7FFFFFFF)
_GOLDEN64 = _u64(0x9E3779B97F4A7C15)
_S15, _S16, _S32 = _u32(15), _u32(16), _u64(32)
_UNIT = f32(2.0**-31 * (1 - 2.0**-24))
_HALF = f32(_UNIT / f32(2))
_POSITIVE, _SIGN, _INFINITE = i32(2**31 - 1), i32(31), i32(0x7F800000)


@njit(**_PART)
def _order(bits):
    """Integers in the order of the float32 numbers with these bits; its own inverse."""
    return i32(bits ^ i32(i32(bits >> _SIGN) & _POSITIVE))


@njit(**_PART)
def _keep_largest(values, V, k, low, high):
    """A number that at least k values are not below: as few more as possible, which are ties; and how many are not below it.

    Args:
        low, high: ordered integers: one that no value is below, and one that fewer than k values are above.
    """
    passing = i32(V)
    while low < high:
        middle = low + (high - low + 1) // 2
        least, count = float_of_bits(_order(i32(middle))), i32(0)
        for v in range(V):
            count = i32(count + i32(values[v] >= least))
        if count >= k:
            low, passing = middle, count
        else:
            high = middle - 1
        if count == k:
            break
    return float_of_bits(_order(i32(low))), passing


@njit(**_PART)
def _keep_about(values, V, k, low, high):
    """Bounds around the k-th largest value: at least k values are not below the first, if possible at most a quarter more."""
    for _ in range(12):
        middle, count = (low + high) * f32(0.5), i32(0)
        for v in range(V):
            count = i32(count + i32(values[v] >= middle))
        if count >= k:
            low = middle
            if count <= k + k // 4:
                break
        else:
            high = middle
    return low, high


@njit(**_PART)
def _keep_mass(values, weights, count, mass, enough, low, high):
    """A number such that the weights of the values not below it sum to more than `mass`, and if possible at most `enough`."""
    while low < high:
        middle = low + (high - low + 1) // 2
        least, total = float_of_bits(_order(i32(middle))), f32(0)
        for n in range(count):
            total += weights[n] if values[n] >= least else f32(0)
        if total > mass:
            low = middle
        else:
            high = middle - 1
        if mass < total <= enough:
            break
    return float_of_bits(_order(i32(low)))


@njit(**_PART)
def _sample_row(logits, temperature, k, p, key, scaled, values, weights, tokens):
    """Token of a row of logits float32 `[V]`; -1 if the reference has to decide. The other arguments: see `sample_rows`."""
    V = len(logits)
    for v in range(V):
        scaled[v] = logits[v]
    if temperature != 1:
        for v in range(V):
            scaled[v] /= temperature
    most, least = i32(-(2**31)), _POSITIVE
    for v in range(V):
        place = _order(bits_of_float(scaled[v]))
        most, least = max(most, place), min(least, place)
    if most >= _INFINITE or least <= i32(~_INFINITE):  # or NaN
        return i64(-1)
    top, bound = float_of_bits(_order(most)), float_of_bits(_order(least))
    above = top
    if k < V:
        bound, above = _keep_about(scaled, V, k, bound, top)
    for v in range(V, V + LANES):
        scaled[v] = f32(-np.inf)
    source, kept, places = i64(scaled.ctypes.data), i64(values.ctypes.data), i64(tokens.ctypes.data)
    count = i64(0)
    for v in range(0, V, LANES):
        count += keep_vector(source + 4 * v, v, bound, kept + 4 * count, places + 4 * count)
    passing = i32(count)
    if k < V:
        low, high = i64(_order(bits_of_float(bound))), i64(_order(bits_of_float(above)))
        bound, passing = _keep_largest(values, count, k, low, high)
    total = f64(0)
    for n in range(count):
        weights[n] = exp(values[n] - top) if values[n] >= bound else f32(0)
        total += f64(weights[n])
    given = count
    if p < 1:
        total -= f64(exp(bound - top)) * f64(max(passing - k, 0))  # of exactly k values, without further ties
        low = i64(_order(bits_of_float(bound)))
        enough = (p + _ENOUGH) * total
        bound = _keep_mass(values, weights, count, (p + MARGIN) * total, enough, low, i64(most))
        for n in range(given, given + LANES):
            values[n] = f32(-np.inf)
        count = i64(0)
        for n in range(0, given, LANES):  # their places are written as bits of `scaled`
            count += keep_vector(kept + 4 * n, n, bound, kept + 4 * count, source + 4 * count)
        for n in range(count):
            place = bits_of_float(scaled[n])
            scaled[n], tokens[n] = weights[place], tokens[place]
    else:
        for n in range(count):
            scaled[n] = weights[n]
    first, second = _u32(key), _u32(key >> _S32)
    best, other, token = f64(1e-30), f64(1e-30), i64(-1)
    winner = f64(0)
    for n in range(count):
        z = _u32(_u32(_u32(tokens[n] + 1) * _GOLDEN) + first)
        z ^= _u32(z >> _S16)
        z = _u32(_u32(z * _LOW1) ^ second)
        z ^= _u32(z >> _S15)
        z = _u32(z * _LOW2)
        z ^= _u32(z >> _S16)
        uniform = f64(f32(i32(z & _ONES)) * _UNIT + _HALF)
        weight = f64(scaled[n])
        if weight >= best * (1 - 4 * MARGIN) * uniform:  # an exponential, -log(1 - u), is at least u
            ratio = weight / -np.log1p(-uniform)
            if ratio > best:
                best, other, token, winner = ratio, best, i64(tokens[n]), weight
            else:
                other = max(other, ratio)
    if other > best * (1 - MARGIN):
        return i64(-1)
    if p < 1:  # top-p surely keeps the token if the more probable ones do not sum to p
        more = f64(0)
        for n in range(given):
            more += f64(weights[n] if f64(weights[n]) > winner else f32(0))
        if more > 0 and more > (p - MARGIN) * total:
            return i64(-1)
    return token


@njit(**_PART)
def _mix(z):
    z = _u64(z ^ (z >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = _u64(z ^ (z >> _u64(27))) * _u64(0x94D049BB133111EB)
    return _u64(z ^ (z >> _u64(31)))


@njit(**_PART)
def _make_key(seed, purpose, step, position):
    """Key of the noise, as `vargen.kernels.noise_bits.make_keys` returns it, but unsigned."""
    key = _mix(_u64(seed) + _u64(_u64(step) * _u64(64) + _u64(purpose + 1)) * _GOLDEN64)
    return _mix(key + _u64(position + 1) * _GOLDEN64)


@compiled(
    "float32 [B, T, V]", "float32 [B]", "int64 [B]", "float64 [B]", int, "int64 [B]", "int64 [B, T]", "float32 [3, V']",
    "int32 [V']", "int64 [B, T - 1]", "int64 [B, T]", "int64 [B]", "int64 [B]", **_FAST,
)  # fmt: skip
def sample_rows(
    logits, temperature, top_k, top_p, purpose, seeds, position, scratch, kept, drafted, tokens, count, next_token
):  # fmt: skip
    """Sample a token from each row of logits, and accept the draft tokens that equal the sampled ones.

    Args:
        top_k, top_p: V and 1 filter nothing.
        scratch, kept: V' is at least 16 above V.
        drafted: a chain; `[0, 0]` without one.
        tokens: written; -1 where the reference has to decide, such as where logits are not finite.
        count, next_token: written: accepted slots with the root, and the token after them; `[0]` without a draft.

    Returns:
        The number of rows that the reference has to decide. If there are any, the last two arguments have no meaning.
    """
    B, T = position.shape
    undecided = i64(0)
    for b in range(B):
        for t in range(T):
            key = _make_key(seeds[b], purpose, i64(0), position[b, t])
            token = _sample_row(
                logits[b, t], temperature[b], top_k[b], top_p[b], key, scratch[0], scratch[1], scratch[2], kept
            )  # fmt: skip
            tokens[b, t] = token
            undecided += i64(token < 0)
    for b in range(len(count)):
        slots = 1
        while slots < T and drafted[b, slots - 1] == tokens[b, slots - 1]:
            slots += 1
        count[b], next_token[b] = slots, tokens[b, slots - 1]
    return undecided


@compiled("int64 [B, N]", "int64 [B]", "int64 [B, T - 1]", "int64 [B, T]", "int64 [B, T]", **_FAST)
def feed_tokens(tokens, length, drafted, inputs, position):
    """Write the last committed token of each image and its draft, a chain, to `inputs`, and the positions after these."""
    B, T = inputs.shape
    for b in range(B):
        for t in range(T):
            inputs[b, t] = drafted[b, t - 1] if t else tokens[b, length[b] - 1]
            position[b, t] = length[b] + t


@compiled(
    "int64 [B, T]", "int64 [B, A]", "int64 [B]", "int64 [B]", "int64 [B]", int, "int64 [B, N + A]", "int64 [B]", **_FAST,
)  # fmt: skip
def commit_tokens(fed, path, accepted, next_token, length, num_tokens, tokens, count):
    """Write the tokens after the accepted slots of a pass to `tokens`, and their number to `count`."""
    slots = path.shape[1]
    for b in range(len(length)):
        count[b] = min(accepted[b], num_tokens - length[b])
        for step in range(slots):  # as the reference: also those that are not committed
            last = step == accepted[b] - 1
            tokens[b, length[b] + step] = next_token[b] if last else fed[b, path[b, (step + 1) % slots]]


@compiled(
    "int64 [B, N + S]", "int64 [B]", "int64 [B, 1]", "int64 [B]", "int64 [B]", int, int, int, "int64 [B, S]", "bool [B, S]",
    **_FAST,
)  # fmt: skip
def draft_window(known, end, position, seeds, steps, purpose, num_tokens, vocab, drafted, valid):
    """Write the next tokens of a Jacobi window to `drafted`, and which are on the grid to `valid`.

    Args:
        known, end: draft tokens by position, and the position after the known ones.
        position: of the first draft token.
        steps: a number of the pass for all images, or for each.
    """
    for b in range(len(drafted)):
        step = steps[b if len(steps) > 1 else 0]
        for s in range(drafted.shape[1]):
            cell = position[b, 0] + s
            valid[b, s] = cell < num_tokens
            if cell < end[b]:
                drafted[b, s] = known[b, cell]
                continue
            key = _make_key(seeds[b], purpose, step, cell)
            uniform = f32(i32(_u32(key >> _S32) & _ONES)) * _UNIT + _HALF
            drafted[b, s] = min(i64(uniform * f32(vocab)), vocab - 1)
