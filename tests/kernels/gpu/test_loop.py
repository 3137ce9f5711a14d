"""The loop through the kernels: the same tokens as through torch, for every kind of draft and rule."""

import pytest
import torch
from tiny_models import tiny_transformer

from vargen.decoding import Accelerator, Jacobi, Sampling, decode, resolve_accelerator
from vargen.decoding.acceptance import exact, recursive_rejection, shared_noise
from vargen.decoding.draft import Step
from vargen.decoding.drafters import JacobiTree, Sequential
from vargen.decoding.sampling import to_probs
from vargen.decoding.tokens import _Images
from vargen.kernels.launch import recording
from vargen.models.condition import Condition
from vargen.pipelines.llamagen_tokens import LlamaGenTokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TREE = (-1, 0, 0, 1, 1)
METHODS = {
    "one token a pass": Accelerator(name="a"),
    "chain, p/q": Accelerator(name="b", drafter=Jacobi(window=4, coupling="maximal"), acceptance=exact),
    "chain, own noise": Accelerator(name="c", drafter=Jacobi(window=4, coupling="gumbel"), acceptance=shared_noise),
    "chain, grouped": Accelerator(name="d", drafter=Jacobi(window=4), acceptance=resolve_accelerator("gsd").acceptance),
    "tree, own noise": Accelerator(name="e", drafter=JacobiTree(TREE, coupling="gumbel"), acceptance=shared_noise),
    "tree, siblings": Accelerator(name="f", drafter=JacobiTree(TREE), acceptance=recursive_rejection),
}


def drawn(method: str | Accelerator, images: int, **overrides: object) -> torch.Tensor:
    codes = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    draft = LlamaGenTokens(tiny_transformer("class", n_layer=1).to(DEVICE), guidance_scale=1.0)
    transformer = tiny_transformer("class", **overrides).to(DEVICE)
    model = LlamaGenTokens(transformer, guidance_scale=2.0, codebook=codes, draft_model=draft)
    condition = Condition(class_labels=torch.arange(images, device=DEVICE))
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95)
    return decode(model, condition, torch.arange(5, 5 + images), method, sampling).tokens.cpu()


@pytest.mark.parametrize("name", METHODS)
def test_a_picture_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"grid_size": 3, "n_layer": 1, "n_kv_head": 1}
    expected = drawn(METHODS[name], 1, **small)
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    assert torch.equal(drawn(METHODS[name], 1, **small), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "sjd", "scd", "gumbel", "gsd", "lantern-jacobi", "recycle", "speculative-tree"])
def test_pictures_of_presets_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn(method, 2)
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    assert torch.equal(drawn(method, 2), expected)


def test_a_pass_over_a_tree_is_judged_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass launches: attention by layer, the sampler, the rule, and one launch that moves keys and values."""
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    launched = []
    import vargen.kernels.launch as home

    run = home.launch
    for module in ("tree_attention", "sampler", "accept_tree", "commit"):
        monkeypatch.setattr(
            f"vargen.kernels.{module}.launch",
            lambda kernel, *args, **options: (launched.append(kernel.__name__), run(kernel, *args, **options)),
        )
    drawn(METHODS["tree, siblings"], 1, grid_size=2, n_layer=2, n_kv_head=1)
    passes = launched.count("_keep")
    assert passes and launched.count("_attend") == 2 * passes and launched.count("_walk") == passes
    assert launched.count("_sample") == passes + 1, "and one behind the prefill"


def test_what_is_recorded_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vargen.kernels.sampler import sample

    with recording() as launches:
        sample(torch.empty(2, 3, 50, device="meta"), top_k=5)
    assert [each.name for each in launches] == ["sample"] and launches[0].programs == 6



@pytest.mark.parametrize("name", METHODS)
def test_a_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, where reading one is an error, with launches that are recorded and not run."""
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    meta, method = torch.device("meta"), METHODS[name]
    model = LlamaGenTokens(tiny_transformer("class").to(meta), guidance_scale=2.0, codebook=torch.empty(64, 8, device=meta))
    seeds, sampling = torch.empty(2, dtype=torch.int64, device=meta), Sampling(top_k=20, top_p=0.95)
    drafter, rule = (method.drafter or Sequential()).bind(model), method.acceptance.bind(model)
    with torch.no_grad(), recording() as launches:
        condition = Condition(class_labels=torch.empty(2, dtype=torch.int64, device=meta))
        cache, out = model.prefill(condition, drafter.max_fed)
        state = drafter.start(model, condition, seeds, sampling, out)
        images = _Images(seeds, 16, drafter.max_fed, model)
        for step in range(1, 4):
            draft = drafter.propose(state, images.tokens, images.length, step)
            fed = images.fed(draft)
            out = model.forward(fed, cache, draft.tree)
            noise, probs = images.noise(draft, step), to_probs(out.logits, sampling)
            verdict = rule(probs, draft, noise, images.relaxation)
            count = images.commit(fed, draft, verdict)
            model.commit(cache, verdict.path, count, draft.tree)
            drafter.observe(state, Step(draft, probs, out.features, verdict, noise, count))
    names = [each.name for each in launches]
    assert names.count("attend") == 2 * 3 and names.count("sample") == 3
    assert any(each in names for each in ("judge", "match", "walk"))
