"""What is beside a pass of the token loop, compiled for a CPU: sampling with shared noise, and committing tokens.

Sampling: filters, softmax and Gumbel-max of a row at a time.

The tokens are those of the torch reference, `Noise.sample(to_probs(logits, sampling), Purpose.TOKEN)`. Sums and exponentials
are rounded otherwise here, so a token is returned only where a difference of that size could not change it: the sum of top-p
up to it is not too close to p, and it wins by enough. Elsewhere the caller computes the row with the reference. Noise is only
computed for tokens that pass the filters, which are few.

Shape suffixes: B images, T rows of each, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numba import config, njit

from vargen.kernels.cpu_steps import INNER, OPTIONS, exp, f32, f64, i32, i64
from vargen.kernels.cpu_vector import LANES, bits_of_float, float_of_bits, keep_vector

MARGIN = 2.0**-16  # relative; rounding errors are about 2^-20, and 2^-18 for exp of very improbable tokens
_ENOUGH = 0.05  # of the mass that top-p keeps: what may be kept at first beyond it
_FAST = {"fastmath": {"nnan", "nsz", "reassoc"}}  # sums in any order
_PART = {**INNER, **_FAST}
_COMPILED = {**OPTIONS, **_FAST, "no_cfunc_wrapper": True, "cache": bool(config.CACHE_DIR)}
_u32, _u64 = np.uint32, np.uint64
_GOLDEN, _LOW1, _LOW2, _ONES = _u32(0x9E3779B9), _u32(0x7FEB352D), _u32(0x846CA68B), _u32(0x7FFFFFFF)
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
    """A number that at least k values are not below: as few more as possible, which are ties.

    Args:
        low, high: ordered integers of the smallest and the largest value.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        least, count = float_of_bits(_order(i32(middle))), i32(0)
        for v in range(V):
            count = i32(count + i32(values[v] >= least))
        if count >= k:
            low = middle
        else:
            high = middle - 1
        if count == k:
            break
    return float_of_bits(_order(i32(low)))


@njit(**_PART)
def _keep_mass(values, weights, count, mass, enough, low, high):
    """A number such that the weights of the values not below it sum to more than `mass`, and if possible at most `enough`."""
    while low < high:
        middle = low + (high - low + 1) // 2
        least, total = float_of_bits(_order(i32(middle))), f64(0)
        for n in range(count):
            total += f64(weights[n] if values[n] >= least else f32(0))
        if total > mass:
            low = middle
        else:
            high = middle - 1
        if mass < total <= enough:
            break
    return float_of_bits(_order(i32(low)))


@njit(**_PART)
def _sample_row(logits, temperature, k, p, key, scaled, values, weights, tokens):
    """Token of a row of logits float32 `[V]`; -1 if the reference has to decide. For the last four arguments see below."""
    V = len(logits)
    size, most, least = i32(0), i32(-(2**31)), _POSITIVE
    for v in range(V):
        scaled[v] = logits[v] / temperature
        bits = bits_of_float(scaled[v])
        size = max(size, i32(bits_of_float(logits[v]) & _POSITIVE), i32(bits & _POSITIVE))
        most, least = max(most, _order(bits)), min(least, _order(bits))
    if size >= _INFINITE:  # or NaN
        return i64(-1)
    top, bound = float_of_bits(_order(most)), float_of_bits(_order(least))
    if k < V:
        bound = _keep_largest(scaled, V, k, i64(least), i64(most))
    for v in range(V, V + LANES):
        scaled[v] = f32(-np.inf)
    source, kept, places = i64(scaled.ctypes.data), i64(values.ctypes.data), i64(tokens.ctypes.data)
    count = i64(0)
    for v in range(0, V, LANES):
        count += keep_vector(source + 4 * v, v, bound, kept + 4 * count, places + 4 * count)
    total = f64(0)
    for n in range(count):
        weights[n] = exp(values[n] - top)
        total += f64(weights[n])
    given = count
    if p < 1:
        total -= f64(exp(bound - top)) * f64(max(count - k, 0))  # of exactly k values, without further ties
        low = i64(_order(bits_of_float(bound)))
        enough = (p + _ENOUGH) * total
        bound = _keep_mass(values, weights, count, (p + MARGIN) * total, enough, low, i64(most))
        count = i64(0)
        for n in range(given):
            if values[n] >= bound:
                scaled[count], tokens[count] = weights[n], tokens[n]
                count += 1
    else:
        for n in range(count):
            scaled[n] = weights[n]
    first, second = _u32(key), _u32(_u64(key) >> _S32)
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


@njit(**_COMPILED)
def sample_rows(logits, temperature, top_k, top_p, keys, scratch, kept, tokens):
    """Sample a token from each row of logits float32 `[B, T, V]`.

    Args:
        temperature, top_k, top_p: float32, int64 and float64 `[B]`; V and 1 filter nothing.
        keys: int64 `[B, T]`, of the noise (`vargen.decoding.noise_bits.make_keys`).
        scratch, kept: scratch, float32 and int32 `[3, V']` and `[V']`, V' at least 16 above V.
        tokens: int64 `[B, T]`, written; -1 where the reference has to decide.

    Returns:
        The number of rows that the reference has to decide.
    """
    undecided = i64(0)
    for b in range(logits.shape[0]):
        for t in range(logits.shape[1]):
            tokens[b, t] = _sample_row(
                logits[b, t], temperature[b], top_k[b], top_p[b], keys[b, t], scratch[0], scratch[1], scratch[2], kept
            )  # fmt: skip
            undecided += i64(tokens[b, t] < 0)
    return undecided


@njit(**_COMPILED)
def commit_tokens(fed, path, accepted, next_token, length, num_tokens, tokens, histogram, count, total):
    """Write the tokens after the accepted slots of a pass; see `vargen.decoding.next_token.loop.ImageState.commit`.

    Args:
        fed: int64 `[B, T]`; path: int64 `[B, A]`; accepted, next_token, length: int64 `[B]`.
        tokens, histogram: changed: int64 `[B, >= num_tokens + A]` and `[>= A + 1]`.
        count, total: written: int64 `[B]`, tokens committed, and the new length.
    """
    slots = path.shape[1]
    for b in range(len(length)):
        count[b] = min(accepted[b], num_tokens - length[b])
        total[b] = length[b] + count[b]
        histogram[count[b]] += 1
        for step in range(slots):  # as the reference: also those that are not committed
            last = step == accepted[b] - 1
            tokens[b, length[b] + step] = next_token[b] if last else fed[b, path[b, (step + 1) % slots]]


@njit(**_COMPILED)
def verify_chain(sampled, drafted, count, next_token):
    """Accept the draft tokens int64 `[B, T - 1]` that equal the sampled ones `[B, T]`, up to the first that does not.

    Args:
        count, next_token: written: int64 `[B]`, accepted slots with the root, and the token after them.
    """
    for b in range(len(sampled)):
        slots = 1
        while slots < sampled.shape[1] and drafted[b, slots - 1] == sampled[b, slots - 1]:
            slots += 1
        count[b], next_token[b] = slots, sampled[b, slots - 1]


@njit(**_PART)
def _mix(z):
    z = _u64(z ^ (z >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    z = _u64(z ^ (z >> _u64(27))) * _u64(0x94D049BB133111EB)
    return _u64(z ^ (z >> _u64(31)))


@njit(**_COMPILED)
def draft_window(resampled, num_committed, position, seed_keys, vocab, drafted):
    """Shift the committed tokens out of a Jacobi window; new positions get tokens from the uniform distribution.

    Args:
        resampled, num_committed: int64 `[B, T]` and `[B]`, of the last pass.
        position: int64 `[B, S]`, grid positions of the draft tokens.
        seed_keys: int64 `[B]`, of seed, purpose and pass (`vargen.decoding.noise_bits.make_seed_keys`).
        drafted: int64 `[B, S]`, written.
    """
    for b in range(len(position)):
        for s in range(position.shape[1]):
            source = num_committed[b] + s
            if source < resampled.shape[1]:
                drafted[b, s] = resampled[b, source]
                continue
            key = _mix(_u64(seed_keys[b]) + _u64(position[b, s] + 1) * _u64(0x9E3779B97F4A7C15))
            uniform = f32(i32(_u32(key >> _S32) & _ONES)) * _UNIT + _HALF
            drafted[b, s] = min(i64(uniform * f32(vocab)), vocab - 1)
