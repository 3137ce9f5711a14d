import torch
from methods import lookup, lookup_shared

from vargen.decoding import decode
from vargen.verify.tables import TableModel


def test_lookup_returns_the_tokens_of_ar_in_fewer_passes():
    model, conditions, seeds = TableModel(vocab=4, tokens=60), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    sequential = decode(model, conditions, seeds, "ar")
    drafted = decode(model, conditions, seeds, lookup_shared)
    assert torch.equal(drafted.tokens, sequential.tokens)
    assert drafted.stats.tokens_per_pass > 1.2
    assert decode(model, conditions, seeds, lookup).stats.tokens_per_pass > 1.2
