"""Enumerate the outcomes of an acceptance rule: the slot at which it ends, then the token after it.

A rule compares uniforms with acceptance probabilities, one for each draft token, or uses no uniforms at all. It is run to
record the probabilities, once, or for a rule that walks from slot to slot once for each slot that has children; and then twice
with answers that make it end at a given slot, with the answers that do not matter set to False and to True.

Shape suffixes: B rows, T tokens fed in one pass, C elements of one request.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vargen.decoding.interfaces import AcceptanceRule
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Tree, Verdict
from vargen.specs import part_name
from vargen.verify.enumeration import SAME, Enumeration, NotEnumerableError


class SlotTests:
    """The tests of a rule on the draft tokens of a pass: each compares a uniform with an acceptance probability.

    Attributes:
        threshold: float64 `[B, T]`, probability that the test of each slot passes; 0 for a slot without a test.
        key: int64 `[B, T]`, identifies the uniform; -1 for a slot without a test.
        step: pass number of the uniforms.
        is_recording: whether thresholds are recorded. Otherwise tests are answered so that each row ends at its slot of `last`.
        fill: answer of tests that do not matter.
    """

    def __init__(self, draft: Draft, leaves_first: bool, batch: int):
        tree = draft.tree
        T = tree.parents.shape[-1]
        self.tree, self.leaves_first = tree, leaves_first
        self.children = tree.children.expand(batch, T, -1) if tree.max_children else torch.zeros(batch, T, 1, dtype=torch.int64)
        valid = torch.ones(batch, T - 1, dtype=torch.bool) if draft.valid is None else draft.valid
        self.valid = torch.nn.functional.pad(valid, (1, 0), value=False)
        self.threshold = torch.zeros(batch, T, dtype=torch.float64)
        self.key = torch.full((batch, T), -1, dtype=torch.int64)
        self.is_recording, self.fill, self.step = True, False, 0
        self.last = torch.zeros(batch, dtype=torch.int64)
        self.answers = _answers_for_each_end(tree, leaves_first).expand(batch, T, T)

    def answer(self, key: Tensor, slot: Tensor, fold: Tensor, threshold: Tensor) -> Tensor:
        """Record or answer tests, `[B, C]` each. `slot` and `fold` say which draft token a test is about."""
        if self.leaves_first:
            tested = torch.where(fold == slot, slot, 0)
        else:
            rank = fold.clamp(max=self.children.shape[2] - 1)
            table = self.children.flatten(1)
            tested = torch.where(fold < self.children.shape[2], table.gather(1, slot * self.children.shape[2] + rank), 0)
        if self.is_recording:
            threshold = torch.where(self.valid.gather(1, tested), threshold, 0.0)
            fresh = self.key.gather(1, tested) < 0  # earlier siblings of what is tested for the first time are rejected
            threshold = torch.where(fresh, threshold, self.threshold.gather(1, tested))
            self.threshold = self.threshold.scatter(1, tested, threshold)
            self.key = self.key.scatter(1, tested, key)
            self.threshold[:, 0], self.key[:, 0] = 0.0, -1  # tests of slots that are no draft token
        answers = self.answers[torch.arange(len(key)), self.last].gather(1, tested)
        return torch.where(answers == 0, self.fill, answers > 0)

    def slots_with_untested_children(self) -> Iterator[int]:
        """Slots at which a rule that walks must end to test their children, from the root down."""
        for slot in range(self.tree.parents.shape[-1]):
            child = self.children[:, slot]
            tested = self.key.gather(1, child.flatten(1)) >= 0
            if bool(((child > 0) & ~tested).any()) and bool((self.key >= 0).any()):
                yield slot

    def end_probs(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probability `[B, T]` that each slot is the last accepted one, and the intervals `[B, T, T]` of all uniforms then.

        Args:
            low, high: float64 `[B, T]`, the interval that each uniform is known to lie in.
        """
        u = self.threshold[:, None]
        same = (self.key[:, :, None] == self.key[:, None, :]) & (self.key >= 0)[:, None]
        starts = torch.where(self.answers < 0, torch.maximum(u, low[:, None]), low[:, None])
        ends = torch.where(self.answers > 0, torch.minimum(u, high[:, None]), high[:, None])
        if not bool(same.tril(-1).any()):
            share = (ends - starts).clamp(min=0) / (high - low)[:, None]
            return share.prod(2), starts, ends
        starts = torch.where(same[:, None], starts[:, :, None], 0.0).amax(3)  # a uniform that several tests share
        ends = torch.where(same[:, None], ends[:, :, None], 1.0).amin(3)
        share = (ends - starts).clamp(min=0) / (high - low)[:, None]
        first = ~same.tril(-1).any(2) & (self.key >= 0)
        return torch.where(first[:, None], share, 1.0).prod(2), starts, ends


def _answers_for_each_end(tree: Tree, leaves_first: bool) -> Tensor:
    """int8 `[T, T]` or `[B, T, T]`: the answers to the tests of all slots with which a rule ends at each slot.

    1: accepted; -1: rejected; 0: any.
    """
    T = tree.parents.shape[-1]
    if leaves_first:
        order = tree.postorder
        accepted, rejected = torch.eye(T, dtype=torch.bool), order[..., None, :] < order[..., :, None]
    else:
        accepted = tree.ancestors
        parents = tree.parents.clamp(min=0)
        parent_accepted = accepted.gather(-1, parents[..., None, :].expand_as(accepted))
        has_accepted_sibling_later = (accepted.double() @ tree.earlier_siblings.double()) > 0
        is_last = parents[..., None, :] == torch.arange(T)[:, None]
        rejected = parent_accepted & ~accepted & (has_accepted_sibling_later | is_last)
    answers = accepted.to(torch.int8) - (rejected & ~accepted).to(torch.int8)
    answers[..., 0] = 0  # the root is not tested
    return answers


class EnumeratedRule(AcceptanceRule):
    """A rule whose every outcome is enumerated: the slot at which it ends, then the token after it.

    Raises:
        NotEnumerableError: if the rule does not end where its tests say.
    """

    def __init__(self, rule: AcceptanceRule, enumeration: Enumeration):
        self.rule, self.enumeration = rule, enumeration
        self.exact, self.topologies, self.requires = rule.exact, rule.topologies, rule.requires
        self.most_drafts = 0
        self.draft: Draft | None = None

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        each, position, B = self.enumeration, noise.position, len(probs)
        self.draft, self.most_drafts = draft, max(self.most_drafts, each.count_rows())
        tests = each.tests = SlotTests(draft, self.rule.leaves_first, B)
        recorded = self.rule(probs, draft, noise, relaxation)
        for slot in tests.slots_with_untested_children():  # of a rule that walks, and is at the root so far
            tests.last = torch.full_like(tests.last, slot)
            self.rule(probs, draft, noise, relaxation)
        tests.is_recording = False
        low, high = each.find_interval(Purpose.ACCEPT, tests.step, tests.key)
        ends, starts_of_each, ends_of_each = tests.end_probs(low, high)
        if not bool((tests.key >= 0).any()):  # a rule without uniforms ends where it ends
            last = recorded.path.gather(1, recorded.count[:, None] - 1)[:, 0]
            ends = torch.nn.functional.one_hot(last, ends.shape[1]).double()
        if each.forced is not None:  # nothing is accepted
            ends = torch.nn.functional.one_hot(torch.zeros(B, dtype=torch.int64), ends.shape[1]).double()
        tests.last = each.choose(ends[:, None], (position[:, :1] < each.num_tokens))[:, 0]
        rows = torch.arange(B)
        each.restrict(Purpose.ACCEPT, tests.step, tests.key, starts_of_each[rows, tests.last], ends_of_each[rows, tests.last])
        depth = draft.tree.depth.expand(B, -1)[rows, tests.last]
        each.settled = position[:, 0] + depth + 1
        verdict = self.rule(probs, draft, noise, relaxation)
        law = each.last_law
        tests.fill = True
        other = self.rule(probs, draft, noise, relaxation)
        ended = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
        agrees = (verdict.count == depth + 1) & (other.count == verdict.count) & (ended == tests.last)
        agrees &= other.next_token == verdict.next_token
        if law is not None and each.last_law is not None:
            agrees &= (law - each.last_law).abs().amax(1) < SAME
        each.tests = None
        if not bool((agrees | (position[:, 0] >= each.num_tokens)).all()):
            raise NotEnumerableError(
                f"acceptance rule {part_name(self.rule)} does not end where its tests say: "
                "it must compare noise.fold_in(k).uniform(Purpose.ACCEPT) at a slot with the acceptance probability of the "
                "k-th child of that slot, or declare leaves_first=True and compare noise.fold_in(slots).uniform(Purpose.ACCEPT)"
            )
        return verdict
