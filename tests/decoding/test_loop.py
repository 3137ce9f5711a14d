"""Laws of the one loop: the right joint probs, rows that do not see each other, drafts that change speed and nothing else."""

import itertools
import math
from typing import Any, Self

import pytest
import torch
from late_reports import delay_reports
from tiny_models import class_pipeline
from torch import Tensor, nn

from vargen import LlamaGenPipeline
from vargen.decoding import (
    Accelerator,
    Draft,
    Drafter,
    Noise,
    NonFiniteLogitsError,
    Purpose,
    TokenState,
    Tree,
    decode,
    resolve_method,
    shared_noise,
)
from vargen.models.guidance import Condition
from vargen.verify.tables import TableModel


class GuessingDrafter(Drafter):
    """Random tokens in a fixed tree; siblings differ."""

    def __init__(self, parents: tuple[int, ...], vocab: int, seed: int = 0):
        self.tree, self.vocab, self.seed = Tree.from_parents(parents), vocab, seed
        self.topology = "chain" if self.tree.is_chain else "tree"

    @property
    def width(self) -> int:
        return len(self.tree.parents)

    def bind(self, model: Any, slots: int) -> Self:
        return self.copy(generator=torch.Generator().manual_seed(self.seed))

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        return self.guess(len(state.seeds), self.generator)  # type: ignore[attr-defined]

    def guess(self, images: int, generator: torch.Generator) -> Draft:
        T = len(self.tree.parents)
        # A random offset per parent plus the sibling's rank: different for siblings.
        rank = [sum(int(p) == int(self.tree.parents[t]) for p in self.tree.parents[:t]) for t in range(T)]
        start = torch.randint(self.vocab, (images, T), generator=generator)
        drafted = (start[:, self.tree.parents.clamp_min(0)] + torch.tensor(rank)) % self.vocab
        return Draft(drafted[:, 1:], self.tree)


TREES = {
    "chain of 1": (-1, 0),
    "chain of 4": (-1, 0, 1, 2, 3),
    "two branches": (-1, 0, 0, 1, 2),
    "bushy": (-1, 0, 0, 0, 1, 1, 2, 4, 4),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("batch", [1, 5])
def test_what_is_drafted_never_changes_what_is_sampled(shape, batch):
    """Same noise, same picture; at a vocabulary of 3 a blind guess is often right, so every path through commit is taken."""
    model = TableModel(vocab=3, tokens=23, seed=5)
    condition, seeds = torch.arange(batch) % 2, torch.arange(100, 100 + batch)
    plain = decode(model, condition, seeds, "ar")
    drafter = GuessingDrafter(TREES[shape], vocab=3)
    fast = decode(model, condition, seeds, Accelerator(drafter=drafter))
    assert torch.equal(plain.tokens, fast.tokens)
    assert fast.stats.passes < plain.stats.passes
    assert fast.stats.tokens == batch * 23
    assert sum(k * n for k, n in enumerate(fast.stats.committed_histogram)) == batch * 23
    assert max(k for k, n in enumerate(fast.stats.committed_histogram) if n) > 1


def test_tokens_per_pass_counts_what_was_committed_and_no_draft():
    """In the passes of images that are not finished, the prefill included."""
    committed = []

    def callback(progress):
        committed.extend(count for count in progress.num_committed.tolist() if count)

    arguments = (TableModel(vocab=3, tokens=23, seed=5), torch.zeros(4, dtype=torch.int64), torch.arange(4))
    for shape in TREES.values():
        committed.clear()
        stats = decode(*arguments, Accelerator(drafter=GuessingDrafter(shape, vocab=3)), callback=callback).stats
        assert sum(committed) == 4 * 23 and stats.tokens_per_pass == sum(committed) / len(committed)
        assert 1 < stats.tokens_per_pass < min(stats.passes_by_width)


def test_ar_feeds_one_token_a_pass():
    model = TableModel(vocab=4, tokens=9)
    result = decode(model, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    assert model.passes == [1] * 8
    assert result.stats.passes == 9 and result.stats.tokens_per_pass == 1.0
    assert set(result.stats.seconds_by_part) == {"prefill", "draft", "target", "accept", "commit"}
    assert result.finished and result.length.tolist() == [9, 9]


def test_a_grid_of_one_token_needs_the_prefill_alone():
    model = TableModel(vocab=4, tokens=1)
    result = decode(model, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert result.tokens.shape == (3, 1) and model.passes == []


def test_callback_sees_every_pass_and_can_stop():
    model, seen = TableModel(vocab=4, tokens=12), []

    def callback(progress):
        seen.append((progress.step, progress.length.tolist(), progress.num_committed.tolist()))
        return progress.step < 5

    seeds = torch.arange(2)
    result = decode(model, torch.zeros(2, dtype=torch.int64), seeds, callback=callback)
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5]
    assert seen[-1][1] == [5, 5] and not result.finished and result.stats.stopped
    whole = decode(model, torch.zeros(2, dtype=torch.int64), seeds)
    assert torch.equal(result.tokens[:, :5], whole.tokens[:, :5])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("method", ["ar", "gumbel"])
def test_passes_that_a_device_runs_after_the_end_are_not_counted(method, is_late, monkeypatch):
    """A GPU is not waited for after each pass: it runs one more than it needs."""
    model, condition, seeds = TableModel(vocab=3, tokens=23, seed=5), torch.zeros(2, dtype=torch.int64), torch.arange(2)
    method = resolve_method(method)
    expected = decode(model, condition, seeds, method)
    if is_late:
        delay_reports(monkeypatch)
    model.passes.clear()
    found = decode(model, condition, seeds, method)
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.stats.passes, found.stats.passes_by_width) == (expected.stats.passes, expected.stats.passes_by_width)
    assert found.stats.committed_histogram == expected.stats.committed_histogram
    assert len(model.passes) == expected.stats.passes - 1 + is_late, "the device ran more"
    found = decode(model, condition, seeds, method, callback=lambda progress: progress.step < expected.stats.passes)
    assert found.finished and found.stats.passes == expected.stats.passes, "it was complete when it was stopped"
    found = decode(model, condition, seeds, method, callback=lambda progress: progress.step < 3)
    assert not found.finished and found.stats.passes == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_stop_with_position_and_pass(value):
    model = TableModel(vocab=4, tokens=12)
    model.table[1, 7, ..., 2] = value
    with pytest.raises(NonFiniteLogitsError, match=r"token 7 of 12, pass 8"):
        decode(model, torch.tensor([0, 1]), torch.arange(2))
    assert decode(model, torch.tensor([0, 0]), torch.arange(2)).finished


def test_non_finite_logits_past_the_grid_do_not_matter():
    """A pass near the end feeds drafts whose probabilities nobody reads."""
    model = TableModel(vocab=3, tokens=10)

    class Overrun(TableModel):
        def logits(self, condition, position, before, last):
            values = super().logits(condition, position, before, last)
            return torch.where((position >= 10)[:, None], math.nan, values)

    model.__class__ = Overrun
    accelerator = Accelerator(drafter=GuessingDrafter((-1, 0, 1, 2), 3))
    result = decode(model, torch.zeros(1, dtype=torch.int64), torch.arange(1), accelerator)
    assert result.finished


def test_trees():
    tree = Tree.from_parents((-1, 0, 0, 1))
    assert tree.depth.tolist() == [0, 1, 1, 2] and tree.max_path == 3 and not tree.is_chain
    assert tree.ancestors.tolist()[3] == [True, True, False, True]
    assert Tree.make_chain(3).is_chain and Tree.make_chain(3).max_path == 4
    for bad in [(), (0,), (-1, 1), (-1, 0, -1)]:
        with pytest.raises(ValueError, match="parents"):
            Tree.from_parents(bad)


def test_same_noise_verdict_against_a_plain_walk():
    """The vectorised verdict equals walking the tree from the root, over every small tree and many draws."""
    generator = torch.Generator().manual_seed(0)
    for parents in itertools.chain(TREES.values(), [(-1, 0, 0, 1, 1, 2, 2)]):
        drafter = GuessingDrafter(parents, vocab=4)
        T = len(parents)
        for trial in range(60):
            draft = drafter.guess(1, torch.Generator().manual_seed(trial))
            target = torch.rand(1, T, 4, generator=generator).softmax(-1)
            seeds, position = torch.tensor([trial]), drafter.tree.depth[None] + 1
            verdict = shared_noise(target, draft, Noise(seeds, position), torch.zeros(1))
            generated = Noise(seeds, position).sample(target, Purpose.TOKEN)[0].tolist()
            path = [0]
            while True:
                follows = [
                    s for s in range(1, T) if parents[s] == path[-1] and int(draft.tokens[0, s - 1]) == generated[path[-1]]
                ]
                if not follows:
                    break
                path.append(follows[0])
            assert verdict.count.item() == len(path)
            assert verdict.path[0, : len(path)].tolist() == path
            assert verdict.next_token.item() == generated[path[-1]]


# -- tensors of inference mode -----------------------------------------------------------------------------------------


CONDITION, SEEDS = Condition(torch.tensor([1, 4])), torch.tensor([3, 5])


@pytest.fixture
def pipe() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def learn(tokens: Tensor) -> None:
    """Fails for a tensor of inference mode, which gradients cannot keep."""
    nn.Embedding(64, 3)(tokens).sum().backward()


@pytest.mark.parametrize("accelerator", ["ar", "gumbel", "gsd"])
def test_tokens_and_lengths_may_be_trained_on(pipe: LlamaGenPipeline, accelerator: str) -> None:
    seen: list[Tensor] = []

    def callback(progress: Any) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        seen.extend((progress.tokens, progress.tokens.clone(), progress.length, progress.num_committed))

    generated = decode(pipe.decoding_model(2.0), CONDITION, SEEDS, accelerator, callback=callback)
    for tensor in (generated.tokens, generated.length, *seen):
        assert not tensor.is_inference()
        learn(tensor)
        tensor.add_(0)
    before = generated.tokens.clone()
    seen[0].zero_()  # the loop's own
    assert torch.equal(generated.tokens, before)


def test_a_generation_leaves_the_mode_as_it_was(pipe: LlamaGenPipeline) -> None:
    def callback(progress: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decode(pipe.decoding_model(1.0), CONDITION, SEEDS, callback=callback)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
