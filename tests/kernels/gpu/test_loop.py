"""The loop through the kernels: the same tokens as through torch, for every kind of draft and rule."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny_models import tiny_transformer

from vargen.decoding import (
    Accelerator,
    Jacobi,
    Sampling,
    decode,
    list_methods,
    resolve_method,
    shared_noise,
    speculative_sampling,
)
from vargen.decoding.experimental import JacobiTree, recursive_rejection
from vargen.decoding.token_pass import TokenPass
from vargen.kernels.dispatch import launch
from vargen.kernels.graph import EAGER_PASSES
from vargen.kernels.host import Clock
from vargen.kernels.noise_bits import TokenNoise
from vargen.models.guidance import Condition
from vargen.models.heads.decoding import EagleModel, MedusaHeads
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.llamagen.decoding import LlamaGenTokenModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {
    "one token a pass": Accelerator(name="a"),
    "chain, p/q": Accelerator(name="b", drafter=Jacobi(window=4, coupling="maximal"), acceptance=speculative_sampling),
    "chain, own noise": Accelerator(name="c", drafter=Jacobi(window=4, coupling="gumbel"), acceptance=shared_noise),
    "chain, grouped": Accelerator(name="d", drafter=Jacobi(window=4), acceptance=resolve_method("gsd").acceptance),
    "tree, own noise": Accelerator(name="e", drafter=JacobiTree(4, 1, 2, "gumbel"), acceptance=shared_noise),
    "tree, siblings": Accelerator(name="f", drafter=JacobiTree(4, 1, 2), acceptance=recursive_rejection),
}


def generated(method: str | Accelerator, images: int, **overrides: object) -> torch.Tensor:
    codes = torch.randn(64, 8, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    sizes = {name: value for name, value in overrides.items() if name == "grid_size"} | {"n_layer": 1}
    draft = LlamaGenTokenModel(tiny_transformer("class", **sizes).to(DEVICE), guidance=1.0)
    transformer = tiny_transformer("class", **overrides).to(DEVICE)
    model = LlamaGenTokenModel(transformer, guidance=2.0, codebook=codes, draft_model=draft)
    condition = Condition(class_labels=torch.arange(images, device=DEVICE))
    sampling = Sampling(temperature=0.9, top_k=20, top_p=0.95)
    return decode(model, condition, torch.arange(5, 5 + images), method, sampling).tokens.cpu()


def watch_launches(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> list[str]:
    """The names of the kernels that are launched from now on, by `run`."""
    names: list[str] = []
    for module in ("attention", "sampler", "verification"):
        monkeypatch.setattr(
            f"vargen.kernels.triton.{module}.launch",
            lambda kernel, *args, **options: (names.append(kernel.__name__), run(kernel, *args, **options)),
        )
    return names


@pytest.mark.parametrize("name", METHODS)
def test_an_image_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"grid_size": 3, "n_layer": 1, "n_kv_head": 1}
    expected = generated(METHODS[name], 1, **small)
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    assert torch.equal(generated(METHODS[name], 1, **small), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "images", "grid"), [("sjd", 2, 2), ("lantern-jacobi", 1, 3), ("recycle", 1, 3), ("speculative-tree", 1, 2)]
)
def test_images_of_presets_are_the_same(method: str, images: int, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose drafter or rule is none of METHODS."""
    small, fitted = {"grid_size": grid, "n_layer": 1}, resolve_method(method)
    expected = generated(fitted, images, **small)
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    assert torch.equal(generated(fitted, images, **small), expected)


def test_a_pass_over_a_tree_is_verified_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass launches: attention by layer, the sampler, and the rule."""
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    launched = watch_launches(monkeypatch, launch)
    generated(METHODS["tree, own noise"], 1, grid_size=2, n_layer=2, n_kv_head=1)
    passes = launched.count("_verify_shared_noise")
    assert passes and launched.count("_attend") == 2 * passes
    assert launched.count("_filter") == launched.count("_gumbel_max") == passes + 1, "and one after the prefill"
    assert set(launched) == {"_attend", "_verify_shared_noise", "_filter", "_gumbel_max"}


class OnMeta:
    """Stands in for a graph where nothing is computed: it runs the pass, so that a read on the host is an error."""

    captured = 0
    forget = staticmethod(lambda: None)

    @classmethod
    def capture(cls, run: Callable[[], object]) -> Callable[[], None]:
        cls.captured += 1
        run()
        return lambda: None


# Low-resolution images are not among them: another loop generates these, whose end the host reads.
PRESETS = [each.name for each in list_methods("next-token") if each.name not in ("mulo", "mulo-exact")]
# Relaxed rules on trees, siblings in order, a rule of a pass.
BY_TORCH = ("lantern", "eagle-2", "wavefront", "pac", "tree, siblings")


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        *((name, True) for name in (*METHODS, "lantern")),
        *(pytest.param(name, True, marks=pytest.mark.extended) for name in PRESETS if name != "lantern"),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in METHODS),  # first passes of others are eager, too
    ],
)
def test_a_step_reads_nothing_on_the_host(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, where reading one is an error, where nothing is launched."""
    monkeypatch.setenv("VARGEN_KERNELS", "triton")
    monkeypatch.setattr("vargen.kernels.dispatch.INTERPRETED", True)  # so meta is not refused beside a GPU
    monkeypatch.setattr(OnMeta, "captured", 0)
    meta, method = torch.device("meta"), METHODS.get(name) or resolve_method(name)
    eagle = EagleDrafter(dim=32, vocab_size=64, grid_size=4, n_head=2, multiple_of=32).eval().to(meta)
    medusa = MedusaDrafter(32, 64, 4).eval().to(meta)
    draft = LlamaGenTokenModel(tiny_transformer("class", n_layer=1).to(meta))
    codes = torch.empty(64, 8, device=meta)
    heads = {"eagle": partial(EagleModel, eagle), "medusa": partial(MedusaHeads, medusa)}
    transformer = tiny_transformer("class", n_layer=3).to(meta)
    model = LlamaGenTokenModel(transformer, 2.0, codebook=codes, draft_model=draft, draft_heads=heads)
    near = torch.empty(64, 20, dtype=torch.int16, device=meta)  # made once for a codebook, before the first pass
    monkeypatch.setattr("vargen.decoding.relaxed_rules.build_neighbor_table", lambda codes, size: near)
    # The start of an image waits for the device: a list of slots, which are on the host, is read there again.
    monkeypatch.setattr(TokenNoise, "replace_rows", lambda self, rows, seeds: None)
    seeds, condition = torch.empty(2, dtype=torch.int64, device=meta), torch.empty(2, dtype=torch.int64, device=meta)
    drafter, rule = method.bind(model, 2)
    token_pass = TokenPass(model, drafter, rule, 2, Clock(meta, False), OnMeta if captured else None)  # type: ignore[arg-type]
    names = watch_launches(monkeypatch, lambda *args, **options: None)
    with torch.no_grad():
        token_pass.allocate(Condition(class_labels=condition))
        token_pass.start([0, 1], Condition(class_labels=condition), seeds, Sampling(top_k=20, top_p=0.95))
        names.clear()
        results, run = [], token_pass.run
        monkeypatch.setattr(token_pass, "run", lambda width, cache: results.append(run(width, cache)) or results[-1])
        for _ in range(4):
            assert token_pass() == drafter.width
    made = EAGER_PASSES + 1 if captured else 4  # one is captured, and then replayed
    assert len(results) == made and OnMeta.captured == captured
    assert all(each.noise.position.shape == (2, drafter.width) and len(each.count) == 2 for each in results)
    assert names.count("_attend") >= 3 * made and names.count("_filter") >= made
    assert (name in BY_TORCH) != any(each.startswith("_verify_") for each in names)
