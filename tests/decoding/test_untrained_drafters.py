"""Lookup: what it counts. Of all drafters without training, `test_exactness` and `test_recorded_tokens` check the rest."""

import pytest
import torch

from vargen.decoding.experimental.earlier_tokens import count_continuations


def surroundings(row: list[int], place: int, vocab: int, columns: int) -> list[int]:
    """The tokens to the left, above, above right, and second to the left; `vocab` outside the grid."""
    line, column = divmod(place, columns)
    places = [(line, column - 1), (line - 1, column), (line - 1, column + 1), (line, column - 2)]
    return [row[y * columns + x] if y >= 0 and 0 <= x < columns else vocab for y, x in places]


@pytest.mark.parametrize("columns", [4, 7, 28])
def test_lookup_counts_what_followed_the_longest_surroundings_that_occurred_before(columns: int):
    vocab, widths = 3, set()
    tokens = torch.randint(vocab, (30, 28), generator=torch.Generator().manual_seed(columns))
    for place in range(1, 28):
        found = count_continuations(tokens, torch.full((30, 1), place), vocab, columns)
        for image, row in enumerate(tokens.tolist()):
            here, *before = (surroundings(row, each, vocab, columns) for each in (place, *range(place)))
            alike = {n: [row[p] for p, then in enumerate(before) if then[:n] == here[:n]] for n in (4, 3, 2, 1)}
            width = next((n for n in alike if alike[n]), 1)
            widths.add(width)
            assert found[image].tolist() == [alike[width].count(token) for token in range(vocab)]
    assert widths >= {1, 3, 4}
