"""One function makes every probs; it equals the official filters, ties and edges included."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vargen.decoding import Sampling
from vargen.decoding.sampling import SlotSampling, to_probs
from vargen.kernels import dispatch
from vargen.kernels.ops import filter_logits
from vargen.models.guidance import apply_guidance

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["llamagen_c2i", "llamagen_t2i"])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.8), (None, 1.0), (10, 1.0), (20, 0.9)])
def test_filters_equal_the_official_ones(name, top_k, top_p):
    io = load_file(GOLDEN / name / "io.safetensors")
    temperature = json.loads((GOLDEN / name / "config.json").read_text())["filter_temperature"]
    probabilities = to_probs(io["filter_logits"], Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = io[f"filter_probs_k{top_k or 0}_p{top_p}"]
    assert torch.allclose(probabilities, expected, atol=1e-6)
    assert torch.equal(probabilities > 0, expected > 0)


def test_guidance_comes_before_temperature_and_filters():
    conditional, unconditional = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).unbind(0)
    sampling = Sampling(temperature=0.7, top_k=5)
    guided = unconditional + 3 * (conditional - unconditional)
    kept = guided >= guided.topk(5).values[..., -1:]
    expected = (guided / 0.7).masked_fill(~kept, -math.inf).softmax(-1)
    assert torch.allclose(to_probs(apply_guidance(conditional, unconditional, 3.0), sampling), expected, atol=1e-7)


def test_ties_with_the_kth_value_stay():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert filter_logits(logits, 1, 1.0).isfinite().tolist() == [[False, True, True, False]]


def test_top_p_keeps_the_crossing_token_and_always_one():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert filter_logits(logits[None], None, 0.6).isfinite().tolist() == [[True, True, False]]
    assert filter_logits(logits[None], None, 1e-9).isfinite().tolist() == [[True, False, False]]


def test_min_p_comes_after_top_p_and_keeps_what_is_probable_enough():
    """Against a plain transcription of the filter of the paper, on the probabilities that top-p leaves."""
    logits = 3 * torch.randn(40, 60, generator=torch.Generator().manual_seed(2))
    for min_p in (0.01, 0.1, 0.5, 1.0):
        kept = filter_logits(logits / 0.8, 30, 0.9).softmax(-1)
        kept = torch.where(kept >= min_p * kept.max(-1, keepdim=True).values, kept, 0.0)
        found = to_probs(logits, Sampling(0.8, 30, 0.9, min_p))
        assert torch.equal(found > 0, kept > 0) and torch.allclose(found, kept / kept.sum(-1, keepdim=True), atol=1e-6)
    assert (found > 0).sum() == len(logits) < (to_probs(logits, Sampling(0.8, 30, 0.9, 0.1)) > 0).sum()
    tied = torch.tensor([[2.0, 2.0, 1.0]])
    assert filter_logits(tied, None, 1.0, 1.0).isfinite().tolist() == [[True, True, False]]


def test_laws_are_float32_from_any_dtype_and_sum_to_one():
    probabilities = to_probs(torch.randn(4, 7, 300).bfloat16(), Sampling(top_k=40, top_p=0.9))
    assert probabilities.dtype == torch.float32
    assert torch.allclose(probabilities.sum(-1), torch.ones(4, 7), atol=1e-5)


def test_temperature_zero_is_greedy():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    probabilities = to_probs(logits, Sampling(temperature=0))
    assert torch.equal(probabilities.argmax(-1), logits.argmax(-1))
    assert probabilities.amax(-1).min() > 0.99


# -- slots ----------------------------------------------------------------------------------------------------------------

OPTIONS = (
    Sampling(), Sampling(0.0), Sampling(0.9, top_p=0.95), Sampling(1.3, top_k=3), Sampling(0.5, 6, 0.8), Sampling(0.0, top_k=4),
    Sampling(0.8, 6, 0.9, 0.2),
)  # fmt: skip


@pytest.mark.parametrize("is_cpu", [True, False], ids=["by group", "by tensors"])
def test_each_slot_has_the_probabilities_of_its_own_options(is_cpu, monkeypatch):
    """Also as on a GPU, where the options are tensors, which a captured pass reads wherever they were first."""
    monkeypatch.setattr(dispatch, "EAGER_CPU", is_cpu)
    slots, generator = SlotSampling(8, 9, torch.device("cpu")), torch.Generator().manual_seed(3)
    held, places = [None] * 8, [each.data_ptr() for each in vars(slots).values() if isinstance(each, torch.Tensor)]
    for turn in range(30):
        rows = torch.randperm(8, generator=generator)[: 1 + turn % 3].tolist()
        new = (None, *OPTIONS)[int(torch.randint(8, (), generator=generator))] if turn else None
        held = [new if row in rows else old for row, old in enumerate(held)]
        slots.set(rows, new)
        logits = 3 * torch.randn(8, 4, 9, generator=generator)
        probs, at_one = slots.probs(logits), slots.probs_at_one(logits)
        for row, options in enumerate(held):
            for found, own in ((probs, options), (at_one, options and replace(options, temperature=1.0))):
                if own is not None:
                    filtered = filter_logits(logits[row] / max(own.temperature, 1e-5), own.top_k, own.top_p, own.min_p)
                    assert found.dtype == torch.float32 and torch.equal(found[row], to_probs(logits[row], own))
                    assert torch.allclose(found[row], filtered.softmax(-1), atol=1e-6)
            assert options is None or slots.is_greedy[row] == options.is_greedy
        used = [each for each in held if each is not None]
        filters, greedy = any(each != Sampling() for each in used), any(each.is_greedy for each in used)
        assert slots.options == held and slots.filters == filters
        assert slots.may_be_greedy() == (greedy if is_cpu else filters)
    assert places == [each.data_ptr() for each in vars(slots).values() if isinstance(each, torch.Tensor)]
