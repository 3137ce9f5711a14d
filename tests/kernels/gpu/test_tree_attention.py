"""Tree attention against torch's under a mask of all slots, in float64: interpreted without a GPU, compiled with one.

What lies around a row's slots is NaN, and so are the outputs before they are written.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from rejects import rejects
from torch import Tensor

from vargen.decoding import Tree
from vargen.kernels.ops import KernelMask
from vargen.kernels.triton import attention
from vargen.kernels.triton.attention import TILES, Tiles, tree_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# By dtype: float32 sums, or one rounding of an output near 1; the interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
SMALL = Tiles(16, 16, 4, 2)  # many tiles of few slots


def random_parents(count: int, seed: int) -> list[int]:
    generate = random.Random(seed)
    return [-1, *(generate.randrange(max(0, slot - 6), slot) for slot in range(1, count))]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: KernelMask, tiles: Tiles | None = None, splits: int | None = None) -> Tensor:
    """Attention with tiles and splits other than those of the shapes."""
    with pytest.MonkeyPatch.context() as patch:
        if tiles is not None:
            patch.setattr(attention, "choose_tiles", lambda *shape: tiles)
        if splits is not None:
            patch.setattr(attention, "choose_splits", lambda *shape: splits)
        return tree_attention(q, k, v, mask).cpu()


class Case:
    """A cache in which all but the slots of each row is NaN, and what attends to it."""

    def __init__(
        self,
        T: int,
        lengths: list[int],
        *,
        H: int = 2,
        G: int = 1,
        K: int = 32,
        P: int = 1,
        room: int = 300,
        earlier: int = 0,
        dtype: torch.dtype = torch.float32,
        stride: int | None = None,
        chain: bool = False,
    ):
        torch.manual_seed(T + K)
        R, held = len(lengths), earlier + T
        slots = P + room + held
        self.earlier = earlier
        self.k, self.v = (torch.zeros(R, G, slots, stride or K, dtype=dtype)[..., :K] for _ in range(2))
        for store in (self.k, self.v):
            store.copy_(torch.randn(R, G, slots, K))
            for row, length in enumerate(lengths):
                store[row, :, P + length + held :] = torch.nan
        self.q = torch.randn(R, T, H, K).to(dtype)
        self.length = torch.tensor(lengths)
        self.bias = torch.randn(R, P) * 3
        parents = [list(range(-1, held - 1)) if chain else random_parents(held, 7 * row) for row in range(R)]
        trees = Tree.batched(torch.tensor(parents), held, held)
        self.ancestors = trees.ancestors[:, earlier:]
        self.words: Tensor | None = None if chain else trees.ancestor_bits[:, earlier:].contiguous()

    def expected(self) -> Tensor:
        R, T, held = self.ancestors.shape
        mask = torch.full((R, 1, T, self.k.shape[2] + int(self.length.max()) + held), -torch.inf, dtype=torch.float64)
        for row, base in enumerate((self.bias.shape[1] + self.length).tolist()):
            mask[row, ..., :base] = 0.0
            mask[row, ..., : self.bias.shape[1]] = self.bias[row]
            mask[row, ..., base : base + held].masked_fill_(self.ancestors[row], 0.0)
        q, k, v = (each.nan_to_num().double() for each in (self.q.transpose(1, 2), self.k, self.v))
        mask = mask[..., : k.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def got(self, **options: object) -> Tensor:
        tensors = (each.to(DEVICE) if each is not None else None for each in (self.q, self.length, self.bias, self.words))
        q, length, bias, words = tensors
        stores = []
        for store in (self.k, self.v):  # of the same strides there
            whole = torch.zeros(*store.shape[:3], store.stride(2), dtype=store.dtype, device=DEVICE)
            whole[..., : store.shape[3]] = store.to(DEVICE)
            stores.append(whole[..., : store.shape[3]])
        assert q is not None and length is not None and bias is not None
        return attend(q, *stores, KernelMask(length, bias, words, self.earlier), **options)  # type: ignore[arg-type]


def check(case: Case, **options: object) -> None:
    out = case.got(**options)
    assert (out.double() - case.expected()).abs().max() <= TOLERANCE[case.q.dtype]


@pytest.mark.parametrize("T", [1, 5, 64, *(pytest.param(T, marks=pytest.mark.extended) for T in (63, 65, 130))])
def test_any_number_of_tokens_and_words(T: int) -> None:
    """Bit 63 of a word is set from 64 tokens on, a second and a third word are needed past it."""
    case = Case(T, [3, 41], P=2, room=60)
    if T >= 64:
        assert case.words is not None and (case.words[..., 63:, 0] < 0).any(), "no tree of this test sets bit 63"
    check(case, tiles=SMALL if T < 63 else Tiles(64, 32, 4, 2), splits=2)


@pytest.mark.parametrize(("K", "stride"), [(32, None), (64, None), (100, 112), (100, None), (128, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_widths_and_dtypes(K: int, stride: int | None, dtype: torch.dtype) -> None:
    check(Case(6, [0, 90], K=K, stride=stride, dtype=dtype, room=100), splits=2)


@pytest.mark.parametrize(("H", "G"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_query_heads_that_share_keys(H: int, G: int) -> None:
    check(Case(7, [20, 33], H=H, G=G, room=40), tiles=SMALL)


@pytest.mark.parametrize("splits", [1, pytest.param(2, marks=pytest.mark.extended), 8])
@pytest.mark.parametrize("P", [1, pytest.param(16, marks=pytest.mark.extended), 20])
def test_ragged_rows_from_an_empty_to_a_full_cache(P: int, splits: int) -> None:
    """Lengths at the borders of tiles; splits that have nothing to read."""
    check(Case(4, [0, 15, 16, 17, 95, 96, 100], P=P, room=100), tiles=SMALL, splits=splits)


def test_a_chain_needs_no_words() -> None:
    check(Case(9, [0, 70], chain=True, room=80), tiles=SMALL, splits=2)


@pytest.mark.parametrize("chain", [True, False])
def test_tokens_of_earlier_passes_after_the_pointer(chain: bool) -> None:
    check(Case(5, [10, 31], earlier=62, chain=chain, room=40), tiles=SMALL, splits=2)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_query_that_sees_nothing_gets_zeros(splits: int) -> None:
    case = Case(2, [0, 50], room=60)
    case.bias.fill_(-torch.inf)
    assert case.words is not None
    case.words[0] = 0  # not even itself
    out = case.got(tiles=SMALL, splits=splits)
    assert not out[0].any()
    assert (out[1].double() - case.expected()[1]).abs().max() < 3e-6


def test_lengths_past_the_last_slot_read_none_after_it() -> None:
    """The store lies before numbers that are none."""
    case = Case(2, [20], room=30)
    slots = case.k.shape[2]
    stores = []
    for store in (case.k, case.v):
        store.nan_to_num_()
        whole = torch.full((2 * store.numel(),), torch.nan, device=DEVICE)
        stores.append(whole[: store.numel()].view(store.shape).copy_(store))
    given = (each.to(DEVICE) for each in (torch.tensor([slots + 30]), case.bias, case.words[0]))
    out = attend(case.q.to(DEVICE), *stores, KernelMask(*given), tiles=SMALL)
    case.length = torch.tensor([slots + 30])
    assert (out.double() - case.expected()).abs().max() < 3e-6


def test_results_do_not_depend_on_splits_and_tiles() -> None:
    case = Case(20, [77, 3], K=64, room=100)
    base = case.got(tiles=SMALL, splits=1)
    for tiles in {Tiles(each.queries, each.keys, 4, 2) for each in TILES.values()}:
        torch.testing.assert_close(case.got(tiles=tiles, splits=4), base, atol=2e-6, rtol=0)


def test_one_tree_for_the_batch_and_a_tree_for_each_image() -> None:
    case = Case(5, [4, 9, 2, 6], room=20)  # rows 0 and 2, and 1 and 3, are two halves of an image under guidance
    case.ancestors = case.ancestors[:2].repeat(2, 1, 1)
    assert case.words is not None
    case.words = case.words[:2].contiguous()
    check(case, tiles=SMALL)
    case.ancestors = case.ancestors[:1].repeat(4, 1, 1)
    case.words = case.words[0].contiguous()
    check(case, tiles=SMALL)


def test_queries_of_another_dtype_are_refused() -> None:
    case = Case(3, [4], room=10)
    case.q = case.q.double()
    rejects(lambda: case.got(tiles=SMALL), "queries")
