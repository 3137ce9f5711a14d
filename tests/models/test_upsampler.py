"""The up-sampler of tokens: what it may see, and what it refuses."""

import torch

from vargen.models.heads.upsampler import TokenUpsampler


def tiny(**options) -> TokenUpsampler:
    torch.manual_seed(0)
    model = TokenUpsampler(**{"vocab_size": 32, "low_grid": 4, "grid_size": 8, "dim": 16, "blocks": 2} | options).eval()
    for parameter in model.parameters():  # as built, blocks are identities
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(B: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (B, 64), generator=generator)
    return torch.randint(32, (B, 4, 4), generator=generator), tokens, torch.rand(B, 64, generator=generator) < 0.7


@torch.no_grad()
def test_a_token_sees_only_rows_above_it_and_the_whole_low_resolution():
    model, (low, tokens, known) = tiny(), inputs(1)
    known[:] = True
    plain = model(model.features(low), tokens, known)
    for at in range(64):
        other = tokens.clone()
        other[0, at] = (other[0, at] + 1) % 32
        moved = ((model(model.features(low), other, known) - plain).abs() > 1e-5).any(-1)[0].nonzero()[:, 0].tolist()
        row, column = divmod(at, 8)
        below = [r * 8 + c for r in range(row + 1, min(row + 4, 8)) for c in range(max(column - 2, 0), min(column + 3, 8))]
        assert moved == below
    low[0, 3, 3] = (low[0, 3, 3] + 1) % 32
    assert ((model(model.features(low), tokens, known) - plain).abs() > 1e-5).any(-1)[0, 0]


@torch.no_grad()
def test_unknown_tokens_are_not_looked_at():
    model, (low, tokens, known) = tiny(), inputs()
    other = torch.where(known, tokens, (tokens + 5) % 32)
    assert torch.equal(model(model.features(low), tokens, known), model(model.features(low), other, known))
    assert not torch.equal(model(model.features(low), tokens, known), model(model.features(low), tokens, known ^ True))


@torch.no_grad()
def test_positions_and_rows_of_a_batch_are_what_they_are_alone():
    model, (low, tokens, known) = tiny(), inputs()
    everything = model(model.features(low), tokens, known)
    position = torch.tensor([[0, 9, 63], [5, 5, 20]])
    some = model(model.features(low), tokens, known, position)
    assert torch.allclose(some, everything.gather(1, position[..., None].expand(-1, -1, 32)), atol=1e-5)
    alone = model(model.features(low[1:]), tokens[1:], known[1:])
    assert torch.allclose(alone, everything[1:], atol=1e-5)
