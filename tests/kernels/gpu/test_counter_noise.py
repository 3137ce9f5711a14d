"""The noise that kernels make: bit by bit that of the reference, and of `vargen.decoding.noise` but for its logarithm."""

import pytest
import torch
import triton
import triton.language as tl

from vargen.decoding.noise import Purpose
from vargen.kernels import noise_bits
from vargen.kernels.triton import sampler as counter_noise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exponential(u: torch.Tensor) -> torch.Tensor:
    """-log(1 - u) of float32 u, by the operations of the kernel, which have the same bits on every device."""
    rest, near = 1.0 - u, u < 0.25
    exponent = torch.where(near, 0, (rest.view(torch.int32) - 0x3F400000) >> 23)
    m = (rest.view(torch.int32) - (exponent << 23)).view(torch.float32)
    f, e = torch.where(near, -u, m - 1.0), exponent.to(torch.float32)
    lost = torch.where(near, 0.0, ((1.0 - rest) - u) / rest)
    s = f / (f + 2.0)
    z, series = s * s, torch.zeros_like(s)
    for term in (13, 11, 9, 7, 5, 3):
        series = z * (torch.tensor(2.0 / term, dtype=torch.float32, device=u.device) + series)
    return -((s * (series - f) + (e * 1.4286068203094172e-06 + lost) + f) + e * 0.693145751953125)


@triton.jit
def _all(seed_ptr, position_ptr, unit_ptr, uniform_ptr, lane_ptr, race_ptr, V, BLOCK: tl.constexpr, PURPOSE: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    key = counter_noise.make_noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE)
    tl.store(unit_ptr + row, counter_noise.uniform32(key))
    tl.store(uniform_ptr + row, counter_noise.uniform64(key))
    tl.store(lane_ptr + row * V + lane, counter_noise.lane_uniforms(key, lane), mask=lane < V)
    tl.store(race_ptr + row * V + lane, counter_noise.exponential_from_key(key, lane), mask=lane < V)


@pytest.mark.parametrize("counted", [False, True], ids=["number", "counted on the device"])
@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("purpose", [Purpose.TOKEN, Purpose.RESIDUAL, Purpose.CHOICE])
def test_noise_is_that_of_the_reference(purpose: Purpose, step: int, counted: bool) -> None:
    V = 1500
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567], device=DEVICE)
    position = torch.tensor([0, 1, 575, 2**32, 3 * 2**32 + 17, 5], device=DEVICE)[:, None]
    R = len(seeds)
    units, uniforms = torch.empty(R, device=DEVICE), torch.empty(R, dtype=torch.float64, device=DEVICE)
    lanes, races = torch.empty(2, R, V, device=DEVICE)
    in_pass = noise_bits.add_steps(seeds, torch.full_like(seeds, step) if counted else step)
    block = {"BLOCK": 2048, "PURPOSE": int(purpose), "enable_fp_fusion": False}
    _all[(R,)](in_pass, position, units, uniforms, lanes, races, V, **block)
    keys = noise_bits.make_keys(seeds, position, purpose, step)
    assert torch.equal(units, noise_bits.uniform_of_keys(keys)[:, 0])
    assert torch.equal(uniforms, noise_bits.uniform64_of_keys(keys)[:, 0])
    expected = noise_bits.to_unit_(noise_bits.lane_bits(keys, V))[:, 0]
    assert torch.equal(lanes, expected), "the uniform numbers of a race"
    assert torch.equal(races, exponential(lanes))
    apart = (
        races.view(torch.int32) - noise_bits.sample_exponential(seeds, position, V, purpose, step)[:, 0].view(torch.int32)
    ).abs()
    assert apart.max() <= 3, "units in the last place of the exponentials"


@triton.jit
def _logarithm(u_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, counter_noise.exponential_from_uniform(tl.load(u_ptr + lane)))


def test_exponentials_are_accurate_from_the_smallest_to_the_largest_number() -> None:
    least, most = 2.0**-32, 1 - 2.0**-24
    near = torch.tensor([least, 2.0**-31, 0.25 - 2.0**-26, 0.25, 0.25 + 2.0**-25, 0.5, 0.75, 1 - 2.0**-23, most])
    u = torch.cat([torch.logspace(-9.6, -1e-6, 2048 - 9), near]).clamp(least, most).to(DEVICE)
    out = torch.empty_like(u)
    _logarithm[(1,)](u, out, BLOCK=2048, enable_fp_fusion=False)
    exact = -torch.log1p(-u.double())
    assert ((out.double() - exact).abs() / exact).max() < 3 * 2.0**-24
    assert (out > 0).all() and torch.equal(out, exponential(u))
