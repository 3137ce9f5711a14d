"""Sequential passes as a graph: the same picture and the same statistics. What stands in for a graph on a CPU repeats the pass
into the tensors that the capture returned, as a graph would; the last test takes a real one, where there is a GPU."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_transformer
from torch import Tensor

from vargen.decoding import Decoded, Sampling, captured, decode, tokens
from vargen.models.condition import Condition
from vargen.pipelines.llamagen_tokens import LlamaGenTokens


class StandIn:
    """Runs the pass at each replay; the captured tensors alone carry its results."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def capture(self, run: captured.Pass) -> tuple[Tensor, ...]:
        self.run, self.out, self.waiting = run, run(), True  # a graph does nothing yet: the first replay makes up for it
        return self.out

    def replay(self) -> None:
        if not self.waiting:
            for kept, new in zip(self.out, self.run(), strict=True):
                kept.copy_(new)
        self.waiting = False


def drawn(device: str = "cpu", **options: Any) -> Decoded:
    model = LlamaGenTokens(tiny_transformer("class").to(device), guidance_scale=2.0)
    condition = Condition(class_labels=torch.tensor([1, 2], device=device))
    return decode(model, condition, torch.tensor([3, 4]), "ar", Sampling(top_k=20), **options)


def test_a_captured_run_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn()
    monkeypatch.setattr(captured, "asked_for", lambda device: True)
    monkeypatch.setattr(StandIn, "made", 0)
    monkeypatch.setattr(tokens._sequential, "__defaults__", (StandIn,))
    seen: list[int] = []
    found = drawn(callback=lambda progress: seen.append(int(progress.length[0])))
    assert torch.equal(found.tokens, expected.tokens) and StandIn.made == 1
    assert seen == list(range(1, 17)), "what callbacks see of each pass"
    assert found.stats.fed == expected.stats.fed and found.stats.passes == expected.stats.passes
    assert found.stats.accepted_histogram == expected.stats.accepted_histogram


def test_a_captured_run_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "asked_for", lambda device: True)
    monkeypatch.setattr(tokens._sequential, "__defaults__", (StandIn,))
    found = drawn(callback=lambda progress: progress.step < 7)
    assert not found.finished and found.length.tolist() == [7, 7]


def test_graphs_are_asked_for_by_a_variable_and_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not captured.asked_for(torch.device("cuda"))
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "1")
    assert captured.asked_for(torch.device("cuda")) and not captured.asked_for(torch.device("cpu"))
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "yes")
    with pytest.raises(ValueError, match="VARGEN_CUDA_GRAPHS must be 0 or 1, got 'yes'"):
        captured.asked_for(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need an NVIDIA GPU")
def test_a_real_graph_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn("cuda")
    monkeypatch.setenv("VARGEN_CUDA_GRAPHS", "1")
    found = drawn("cuda")
    assert torch.equal(found.tokens, expected.tokens)
