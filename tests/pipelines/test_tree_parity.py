"""What is left of a tree after acceptance is the cache of its path alone: keys, values and the next logits, to rounding."""

import pytest
import torch
from tiny_models import tiny_transformer

from vargen.decoding import Tree
from vargen.models.guidance import Condition
from vargen.models.llamagen.decoding import LlamaGenTokenModel

GRID, T, VOCAB = 4, 7, 64
CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # float32 sums in another order


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def model_and_condition(kind: str, scale: float, images: int, compress: bool) -> tuple[LlamaGenTokenModel, Condition]:
    model = LlamaGenTokenModel(tiny_transformer(kind, grid_size=GRID), scale, compress_prefix=compress)
    if kind == "class":
        return model, Condition(class_labels=torch.arange(images) % 10)
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(12) >= torch.randint(11, (images, 1), generator=generator)
    rows = torch.randn(images, 12, 32, generator=generator) * mask[..., None]
    return model, Condition(caption_embeds=rows, caption_mask=mask)


def random_tree(images: int, per_image: bool, generator: torch.Generator) -> Tree:
    rows = [[-1, *(int(torch.randint(slot, (), generator=generator)) for slot in range(1, T))] for _ in range(images)]
    return Tree.batched(torch.tensor(rows), max_path=T, max_children=T) if per_image else Tree.from_parents(tuple(rows[0]))


def random_paths(tree: Tree, images: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A path from the root to any slot of each image's tree, and the number of its slots."""
    ancestors, path, count = tree.ancestors.expand(images, T, T), torch.zeros(images, tree.max_path, dtype=torch.int64), []
    for image in range(images):
        end = int(torch.randint(T, (), generator=generator))
        slots = ancestors[image, end].nonzero()[:, 0]
        path[image, : len(slots)] = slots
        count.append(len(slots))
    return path, torch.tensor(count)


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("kind,scale,compress", [("class", 1.0, True), ("class", 3.0, True), ("text", 2.0, False)])
def test_compaction_leaves_the_cache_of_a_fresh_prefill(kind, scale, compress, per_image):
    """Random trees, batches whose images go on at their own pace, over the ends of rows and of the grid."""
    for images in (1, 4):
        generator = torch.Generator().manual_seed(images)
        model, condition = model_and_condition(kind, scale, images, compress)
        cache, _ = model.start(condition, T)
        total, held, moved = GRID * GRID, [[] for _ in range(images)], False
        tokens = torch.randint(VOCAB, (images, total), generator=generator)
        for _ in range(5):
            tree = random_tree(images, per_image, generator)
            fed = torch.randint(VOCAB, (images, T), generator=generator)
            model.forward(fed, cache, tree)
            path, count = random_paths(tree, images, generator)
            count = torch.minimum(count, torch.tensor([total - len(row) for row in held]))  # at its end, an image keeps less
            moved |= bool((path[:, 1:] > torch.arange(1, tree.max_path)).any())
            model.commit(cache, path, count, tree)
            for image, row in enumerate(held):
                row += fed[image, path[image, : count[image]]].tolist()
        lengths = [len(row) for row in held]
        assert cache.length.tolist() == lengths * model.rows_per_image and max(lengths) > GRID and moved
        for image, row in enumerate(held):
            alone, _ = model.start(_of(condition, image), total)
            model.forward(torch.tensor([row]), alone, Tree.make_chain(len(row) - 1))
            end = cache.prefix + len(row)
            for half in range(model.rows_per_image):
                mine = image + half * images
                for store in ("k", "v"):
                    kept, fresh = getattr(cache, store)[:, mine, :, :end], getattr(alone, store)[:, half, :, :end]
                    torch.testing.assert_close(kept, fresh, **CLOSE)
            if len(row) < total:
                alone.commit_chain(len(row))
                fresh = model.forward(tokens[:1, :1], alone, Tree.make_chain(0)).logits[0]
                kept = model.forward(tokens[:1, :1].expand(images, 1), cache, Tree.make_chain(0)).logits[image]
                torch.testing.assert_close(kept, fresh, **CLOSE)


def _of(condition: Condition, image: int) -> Condition:
    rows = slice(image, image + 1)
    if condition.class_labels is not None:
        return Condition(class_labels=condition.class_labels[rows])
    return Condition(caption_embeds=condition.caption_embeds[rows], caption_mask=condition.caption_mask[rows])
