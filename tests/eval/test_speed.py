"""The measurements measure what they say: the passes are real, repeatable, and of a half-full cache."""

import pytest
import torch

from vargen.bench.passes import BenchmarkModel, decode_images, half_filled_caches, weight_readers
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.pipelines.llamagen import LlamaGenPipeline


def benchmark_model(transformer: LlamaGenTransformer, **defaults: float) -> BenchmarkModel:
    return BenchmarkModel("tiny", LlamaGenPipeline(vqvae=None, transformer=transformer, defaults=defaults))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def network() -> BenchmarkModel:
    torch.manual_seed(0)
    model = LlamaGenTransformer(dim=32, n_layer=2, n_head=2, vocab_size=64, grid_size=4, num_classes=10, multiple_of=16)
    torch.nn.init.normal_(model.output.weight)
    return benchmark_model(model.eval(), guidance_scale=2.0)


@torch.no_grad()
def test_caches_that_share_memory_work_like_caches_of_their_own(network: BenchmarkModel) -> None:
    model = network.transformer
    caches = half_filled_caches(model, 3, [4, 1, 2])
    assert {width: cache.scratch for width, cache in caches.items()} == {1: 1, 2: 2, 4: 4}
    assert len({cache.k.data_ptr() for cache in caches.values()}) == 1
    for width, cache in caches.items():
        own = model.new_cache(3, scratch=width)
        own.k.copy_(cache.k)
        own.v.copy_(cache.v)
        own.commit_chain(8)
        fed = torch.randint(64, (3, width))
        expected = model(fed, cache=own).logits
        for _ in range(2):  # a pass does not move the pointer, so the next is the same pass
            assert torch.equal(model(fed, cache=cache).logits, expected)
        assert cache.length.tolist() == [8, 8, 8]


def test_weights_read_are_all_but_the_tables_that_are_looked_up(network: BenchmarkModel) -> None:
    names = {"tok_embeddings.weight", "cls_embedding.embedding_table.weight"}
    parameters = dict(network.transformer.named_parameters())
    assert names < parameters.keys()
    expected = sum(p.nbytes for name, p in parameters.items() if name not in names)
    assert network.weight_bytes == expected
    total, dot, product = (read() for read in weight_readers(4 * 10 * 1024, torch.device("cpu")))
    assert total.shape == dot.shape == () and product.shape == (10,)  # each took all ten rows


@pytest.mark.parametrize("condition", ["class", "text"])
def test_the_baseline_decodes_whole_images(condition: str) -> None:
    model = LlamaGenTransformer(
        condition=condition, dim=32, n_layer=1, n_head=2, vocab_size=64, grid_size=4, caption_dim=8, cls_token_num=3,
        multiple_of=16,
    ).eval()  # fmt: skip
    found = benchmark_model(model)
    stats = decode_images(found, 2)
    assert stats.tokens == 2 * 16 and stats.passes == 16 and not stats.stopped
    assert found.condition(2).cat(found.condition(2)) is not None
