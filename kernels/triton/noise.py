"""The counter-based noise of `vargen.decoding.noise` inside kernels: a function of (seed, position, purpose, pass).

Keys and 31-bit lanes are integers, which wrap the same way on every device. `uniform32` and `uniform64` round only once, so
they are bit-equal to the torch reference unless the compiler fuses multiplications and additions: kernels that use them are
launched with `enable_fp_fusion=False`. `exponential_from_key` takes a logarithm, which torch computes differently on each
device. Here it is a fixed sequence of IEEE operations, bit-equal to `reference.exponential` on every device, and within 3 units
in the last place of torch's.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
_GOLDEN32 = tl.constexpr(0x9E3779B9)
_LOW1 = tl.constexpr(0x7FEB352D)
_LOW2 = tl.constexpr(0x846CA68B)
_UNIT = tl.constexpr(2.0**-31 * (1 - 2.0**-24))
_HALF_UNIT = tl.constexpr(2.0**-32 * (1 - 2.0**-24))
_LN2_HIGH = tl.constexpr(0.693145751953125)  # 17 bits, so that products with exponents are exact
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)
BRANCH = tl.constexpr(1 << 32)  # offset between the streams of several samples at one position


@triton.jit
def _mix(z):
    z ^= z >> 30
    z *= _MIX1
    z ^= z >> 27
    z *= _MIX2
    return z ^ (z >> 31)


@triton.jit
def make_noise_key(seed, position, PURPOSE: tl.constexpr, step):
    """Return the uint64 key of a stream. `seed`, `position` and `step` are integers of broadcastable shapes. `step` can also be
    a pointer to one int64, if the device counts the passes."""
    if step.dtype.is_ptr():
        step = tl.load(step)
    number = (step.to(tl.int64) * 64 + (PURPOSE + 1)).to(tl.uint64, bitcast=True)
    key = _mix(seed.to(tl.uint64, bitcast=True) + number * _GOLDEN)
    return _mix(key + (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def _bits_to_uniform32(bits):
    return (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * _UNIT + _HALF_UNIT


@triton.jit
def uniform32(key):
    """float32 in (0, 1): `noise.sample_uniform`."""
    return _bits_to_uniform32((key >> 32).to(tl.uint32))


@triton.jit
def uniform64(key):
    """float64 in (0, 1), with 52 random bits: `noise.sample_uniform64`."""
    return ((key >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.0**-52


@triton.jit
def lane_uniforms(key, lane):
    """float32 in (0, 1), one per lane (token) of a key: the uniforms of `noise.sample_exponential`."""
    z = (lane + 1).to(tl.uint32) * _GOLDEN32 + key.to(tl.uint32)
    z ^= z >> 16
    z *= _LOW1
    z ^= (key >> 32).to(tl.uint32)
    z ^= z >> 15
    z *= _LOW2
    z ^= z >> 16
    return _bits_to_uniform32(z)


@triton.jit
def exponential_from_uniform(u):
    """-log(1 - u) of float32 u in (0, 1), accurate down to the smallest u, which decide Gumbel-max sampling.

    log(m 2^e) = e log 2 + 2 atanh(s) with s = (m - 1) / (m + 1) and m in [0.75, 1.5). Then |s| <= 0.2, and the error of six
    terms of the series is below half a unit in the last place. For u < 0.25 the exponent is 0 and m - 1 is exactly -u, so the
    rounding of 1 - u does not matter.
    """
    rest = 1.0 - u
    bits = rest.to(tl.int32, bitcast=True)
    exponent = tl.where(u < 0.25, 0, (bits - 0x3F400000) >> 23)
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = tl.where(u < 0.25, -u, m - 1.0)
    lost = tl.where(u < 0.25, 0.0, tl.math.div_rn((1.0 - rest) - u, rest))  # rounding error of 1 - u
    s = tl.math.div_rn(f, f + 2.0)
    z = s * s
    series = z * (0.6666667 + z * (0.4 + z * (0.2857143 + z * (0.22222222 + z * (0.18181819 + z * 0.15384616)))))
    # 2 s = f - s f, where the larger term f is exact.
    small = s * (series - f) + (exponent.to(tl.float32) * _LN2_LOW + lost)
    return -((small + f) + exponent.to(tl.float32) * _LN2_HIGH)


@triton.jit
def exponential_from_key(key, lane):
    """Exponential(1) noise, float32 > 0, one per lane (token) of a key: `noise.sample_exponential`."""
    return exponential_from_uniform(lane_uniforms(key, lane))
