"""Windows that differ from image to image: exact, independent of what is beside an image, and only what is needed is fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from initial_drafts import mixture
from table_methods import table_model
from tiny_models import text_pipeline

from vargen.decoding import Accelerator, Jacobi, Sampling, decode, shared_noise, speculative_sampling
from vargen.decoding.next_token import row_windows
from vargen.decoding.next_token.draft import Draft, Tree
from vargen.decoding.next_token.draft_length import FixedWindow
from vargen.decoding.next_token.engine import Engine
from vargen.decoding.next_token.row_windows import RowWindow, RowWindows
from vargen.evaluation.exact_sum import sum_pass
from vargen.evaluation.exactness import DETECTED, TOLERANCE, Case

SEEDS, CONDITION = torch.arange(100, 106), torch.tensor([0, 1, 1, 0, 1, 0])


@pytest.fixture
def sensitive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of tiny grids react to every pass."""
    for name, value in (("_PRIOR_PASSES", 0.1), ("_MIN_WINDOW", 2), ("_SPLIT", 1.0)):
        monkeypatch.setattr(row_windows, name, value)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The widths of all passes."""
    found: list[torch.Tensor] = []
    choose = RowWindows.choose_width

    def record(self: RowWindows) -> int:
        width = choose(self)
        found.append(self.widths.clone())
        return width

    monkeypatch.setattr(RowWindows, "choose_width", record)
    return found


@pytest.mark.parametrize("coupling", ["independent", "maximal"])
def test_windows_of_ones_own_past_are_exact(coupling: Any, sensitive: None, chosen: list[torch.Tensor]) -> None:
    method = Accelerator(drafter=Jacobi(RowWindow(3), coupling, mixture), acceptance=speculative_sampling)
    found = sum_pass(method, Case("1 x 4", 4).model(), passes=4)
    assert max(found.distance, found.draft_distance) <= TOLERANCE
    assert any(len(widths.unique()) > 1 for widths in chosen)


class OwnToken(Jacobi):
    """Drops a draft token because of its own value."""

    def propose(self, state: Any, tokens: Any, length: Any, noise: Any) -> Draft:
        draft = super().propose(state, tokens, length, noise)
        return draft.shorten(torch.where(draft.tokens[:, 0] == 0, 1, 3))


def test_the_check_fails_for_a_window_that_depends_on_the_token_it_drops() -> None:
    method = Accelerator(drafter=OwnToken(3, initial=mixture), acceptance=speculative_sampling)
    assert sum_pass(method, Case("1 x 4, 2 codes", 4, vocab=2).model(), passes=2).distance >= DETECTED


METHODS = {
    "gumbel": Accelerator(drafter=Jacobi(RowWindow(5), "gumbel"), acceptance=shared_noise),
    "scd": Accelerator(drafter=Jacobi(RowWindow(5), "maximal"), acceptance=speculative_sampling),
}


@pytest.mark.parametrize("name", METHODS)
def test_an_image_is_the_same_alone_and_beside_others(name: str, sensitive: None, chosen: list[torch.Tensor]) -> None:
    engine = Engine(table_model(), METHODS[name], batch_size=3)
    engine.submit(CONDITION, SEEDS)
    for image in engine.run():
        row = slice(image.number, image.number + 1)
        alone = decode(table_model(), CONDITION[row], SEEDS[row], METHODS[name])
        assert torch.equal(image.tokens, alone.tokens[0]) and image.passes == alone.stats.passes
    assert any(len(widths.unique()) > 1 for widths in chosen)


@pytest.mark.parametrize("window", ["rows", RowWindow(4)])
def test_shared_noise_gives_the_images_of_sequential_decoding(window: Any, sensitive: None) -> None:
    method = Accelerator(drafter=Jacobi(window, "gumbel"), acceptance=shared_noise)
    found = decode(table_model(), CONDITION, SEEDS, method, batch_size=4)
    assert torch.equal(found.tokens, decode(table_model(), CONDITION, SEEDS).tokens)


def test_a_shared_budget_is_spent_where_drafts_are_accepted() -> None:
    windows = RowWindows(FixedWindow(9), images=3, max_width=18, is_shared_out=True)
    active = torch.tensor([True, True, True])
    for _ in range(20):
        windows.choose_width()
        windows.observe(torch.tensor([1, 3, 7]), active)
    windows.choose_width()
    assert windows.widths[0] < windows.widths[1] < windows.widths[2]
    assert abs(int(windows.widths.sum()) - 27) <= 2
    windows.restart(torch.tensor([2]))
    assert windows.choose_width() < 14 and windows.widths[2] < 14


@pytest.mark.parametrize(("window", "words"), [(1, "at least 2"), ("row", "unknown window")])
def test_invalid_windows_are_refused(window: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RowWindow(window)


# -- packed passes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe() -> Any:
    return text_pipeline(grid_size=4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_packed_pass_equals_a_whole_one_in_what_it_feeds(pipe: Any, guidance: float) -> None:
    model, tree = pipe.decoding_model(guidance), Tree.make_chain(3)
    condition, _ = pipe.encode_condition(["a red apple", "a dog", "a cat", "b"])
    tokens, fed = torch.randint(0, model.vocab, (4, 4)), torch.tensor([1, 4, 0, 2])
    with torch.no_grad():
        state, _ = model.prefill(condition, 4)
        for count in ([2, 4, 1, 3], [1, 1, 4, 2]):  # rows of different lengths
            model.forward(tokens, state, tree)
            model.commit(state, torch.arange(4).expand(4, 4), torch.tensor(count), tree)
        packed = model.forward_packed(tokens, state, tree, fed)
        whole = model.forward(tokens, state, tree)
    rows = torch.cat([fed] * (len(whole.features) // len(fed)))
    for row, count in enumerate(fed.tolist()):
        torch.testing.assert_close(packed.logits[row, :count], whole.logits[row, :count], atol=1e-4, rtol=1e-4)
        assert not packed.logits[row, count:].any()
    for row, count in enumerate(rows.tolist()):
        torch.testing.assert_close(packed.features[row, :count], whole.features[row, :count], atol=1e-4, rtol=1e-4)


def test_finished_images_and_places_past_the_grid_are_not_fed(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pipe.decoding_model(1.0)
    condition, _ = pipe.encode_condition(["a red apple", "a dog", "a cat"])
    given: list[torch.Tensor] = []
    forward = model.forward_packed

    def record(tokens: Any, state: Any, tree: Any, fed: torch.Tensor) -> Any:
        given.append(fed.clone())
        return forward(tokens, state, tree, fed)

    monkeypatch.setattr(model, "forward_packed", record)
    found = decode(model, condition, torch.tensor([1, 2, 3]), "gumbel:window=5", Sampling())
    assert torch.equal(found.tokens, decode(pipe.decoding_model(1.0), condition, torch.tensor([1, 2, 3]), "ar").tokens)
    fed = torch.stack(given)
    assert fed.max() == 5 and (fed[-1] < 5).all() and not fed[-1].all()
