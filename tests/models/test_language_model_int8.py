"""Language models of transformers with 8-bit layers: the same bits in any batch and width; near the float model."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import make_case
from int8_passes import BACKENDS, compiled_code
from low_rank import LowRank
from tiny_language_models import has_release, make_causal, make_chameleon, make_emu3, make_glm, make_janus, needs_janus

import vargen
from vargen.decoding import Sampling, Tree, decode
from vargen.decoding.methods import resolve_method
from vargen.kernels.int8.arithmetic import exact_erf_gelu
from vargen.kernels.int8.load import LANGUAGE_PASS
from vargen.models.transformers import int8
from vargen.models.transformers.base import PromptRows
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.int8_decoding import Int8Parts, Int8TokenModel
from vargen.models.transformers.supported import describe_language_model
from vargen.pipelines.regeneration import describe_environment

pytestmark = needs_janus
PROMPTS = ["a red apple", "a blue car on the moon", "dog"]
# Groups of heads, heads wider than the model, biases, and a rotated half of each head.
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "janus": (make_janus, {}, {}),
    "janus wide": (make_janus, {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24}, {}),
    "emu3": (make_emu3, {}, {"size": (4, 5)}),
    "glm-image": (make_glm, {"attention_bias": True}, {"size": (2, 3)}),
    "emu3.5": (partial(make_causal, "emu3.5"), {}, {"size": (4, 5)}),
    "glm-image half": (make_glm, {"head_dim": 16, "rope_parameters": ROPE}, {"size": (2, 3)}),
}


class Case:
    """A tiny model, and its 8-bit parts by backend."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch):
        make, sizes, self.options = CASES[name]
        if not has_release(name.split()[0]):
            pytest.skip(f"{name} came with a newer transformers")
        self.model, self.processor = make(seed=1, **sizes)
        self.described = describe_language_model(self.model, self.processor, **self.options)
        self.scale = 3.0 if self.described.guided else 1.0
        compiled_code(LANGUAGE_PASS)
        self.parts = {"compiled": self._quantize()}
        monkeypatch.setattr(int8, "LANGUAGE_PASS", NoCode())
        self.parts["operators"] = self._quantize()

    def _quantize(self) -> Int8Parts:
        return Int8Parts(self.described, int8.quantize_layers(self.described))

    def token_model(self, backend: str) -> Any:
        if backend == "float":
            return TransformersTokenModel(self.described, self.scale)
        return Int8TokenModel(self.described, self.parts[backend], self.scale)

    def rows(self, prompts: list[str]) -> PromptRows:
        pipe = vargen.accelerate(self.model, self.processor, **self.options)
        rows: PromptRows = pipe.encode_condition(prompts)[0]
        return rows


class NoCode:
    def load(self, wait: bool | None = None) -> None:
        """Where Numba is missing."""


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(request.param, monkeypatch)


def chain(width: int) -> Tree:
    return Tree.make_chain(width - 1)


def run_passes(case: Case, backend: str, prompts: list[str], widths: list[int]) -> list[torch.Tensor]:
    """Logits and features of the prefill and of passes over the first tokens of each image, by token."""
    model, rows = case.token_model(backend), case.rows(prompts)
    tokens = torch.stack(
        [torch.randint(model.vocab, (8,), generator=torch.Generator().manual_seed(len(each))) for each in prompts]
    )
    with torch.inference_mode():
        state = model.allocate(rows, max(widths))
        found, first = [model.prefill(rows, state)], 0
        for width in widths:
            found.append(model.forward(tokens[:, first : first + width], state, chain(width)))
            model.commit(state, torch.arange(width).expand(len(prompts), -1), torch.full((len(prompts),), width), chain(width))
            first += width
    return [torch.cat([getattr(each, name) for each in found], 1) for name in ("logits", "features")]


def test_backends_widths_and_batches_have_the_same_bits(case: Case) -> None:
    expected = run_passes(case, "operators", PROMPTS, [1] * 6)
    assert expected[0].isfinite().all() and expected[0].std() > 0
    for backend in BACKENDS:
        for found, known in zip(run_passes(case, backend, PROMPTS, [4, 2]), expected, strict=True):
            assert torch.equal(found, known), backend
    images = len(PROMPTS)
    for backend in BACKENDS:  # alone, without the longer prompts
        logits, features = run_passes(case, backend, PROMPTS[2:], [3, 3])
        assert torch.equal(logits, expected[0][2:]) and torch.equal(features, expected[1][2::images])


def test_numbers_are_near_those_of_the_float_model(case: Case) -> None:
    for backend in BACKENDS:
        pairs = zip(run_passes(case, backend, PROMPTS, [4]), run_passes(case, "float", PROMPTS, [4]), strict=True)
        for found, expected in pairs:
            assert (found - expected).std() < 0.1 * expected.std(), backend


def test_a_path_of_a_tree_equals_a_chain(case: Case) -> None:
    rows, tokens = case.rows(PROMPTS[:1]), torch.tensor([[3, 5, 7, 2, 9]])
    tree = Tree.from_parents((-1, 0, 0, 1, 2))
    found = {}
    for backend in BACKENDS:
        model = case.token_model(backend)
        with torch.inference_mode():
            whole, path = (model.allocate(rows, 5) for _ in range(2))
            for state in (whole, path):
                model.prefill(rows, state)
            found[backend] = model.forward(tokens, whole, tree).logits
            alone = model.forward(tokens[:, [0, 2, 4]], path, chain(3)).logits
            assert torch.equal(found[backend][:, [0, 2, 4]], alone)
            model.commit(whole, torch.tensor([[0, 2, 4]]), torch.tensor([3]), tree)
            model.commit(path, torch.tensor([[0, 1, 2]]), torch.tensor([3]), chain(3))
            after = [model.forward(tokens[:, :2], state, chain(2)).logits for state in (whole, path)]
            assert torch.equal(*after)
    assert torch.equal(found["compiled"], found["operators"])


@pytest.mark.parametrize("method", ["gumbel", "auto", "skip"])
def test_exact_methods_generate_the_image_of_ar(case: Case, method: str) -> None:
    rows, seeds = case.rows(PROMPTS), torch.arange(3)
    for backend in BACKENDS:
        model = case.token_model(backend)
        if method == "skip" and model.num_layers < 3:
            reduced = model.skip_layers([0])
            assert reduced.num_layers == model.num_layers - 1
            decode(reduced, rows, seeds, resolve_method("ar"), Sampling())
            continue
        images = [decode(model, rows, seeds, resolve_method(each), Sampling()).tokens for each in ("ar", method)]
        assert torch.equal(*images)


@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_a_folder_opens_in_8_bits_without_the_layers_in_float(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, _, options = CASES[name]
    model, processor = make(seed=1)
    vargen.accelerate(model, processor, **options).save_pretrained(tmp_path)
    pipe = vargen.open_pipeline(str(tmp_path), quantization="int8", **options)
    assert not len(pipe.language_model.body.layers) and "UNEXPECTED" not in caplog.text
    expected = vargen.accelerate(model, processor, quantization="int8", **options)
    images = [
        each("a red apple", accelerator="gumbel", generator=torch.Generator().manual_seed(3)) for each in (pipe, expected)
    ]
    assert torch.equal(images[0].tokens, images[1].tokens)
    assert describe_environment(pipe)["quantization"] == "int8"
    with pytest.raises(ValueError, match="cannot be saved"):
        pipe.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    shared = type(pipe).from_pipe(pipe)
    again = shared("a red apple", accelerator="ar", generator=torch.Generator().manual_seed(3))
    assert torch.equal(again.tokens, images[0].tokens)


def test_what_cannot_run_in_8_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = make_janus()
    vargen.accelerate(model, processor).save_pretrained(tmp_path)
    read: list[Any] = []
    monkeypatch.setattr("vargen.folders.transformers_networks.StoredNetwork.load", lambda *_, **options: read.append(options))
    for options, message in (
        ({"quantization": "int4"}, "quantization must be 'int8' or None .* got 'int4'"),
        ({"quantization": "int8", "device_map": "auto"}, "quantization must be None beside device_map"),
    ):
        with pytest.raises(ValueError, match=message):
            vargen.open_pipeline(str(tmp_path), **options)
    assert not read
    with pytest.raises(ValueError, match=r"layers like those of Llama, and Chameleon\w+ has self_attn\.k_norm"):
        vargen.accelerate(*make_chameleon(), quantization="int8")
    model.model.language_model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match="finite weights"):
        vargen.accelerate(model, processor, quantization="int8")


# -- in place ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["janus", "emu3", "glm-image"])
def test_an_enabled_call_runs_on_8_bit_copies_of_the_present_weights(name: str) -> None:
    case = make_case(name)
    untouched = case.generate()
    vargen.enable(case.model, "ar", quantization="int8")
    found = case.generate()
    assert found.shape == untouched.shape and not vargen.summary(case.model).original
    assert (found == untouched).float().mean() > 0.5  # greedy chains part where two tokens are near
    vargen.disable(case.model)
    vargen.enable(case.model, "gumbel", quantization="int8")
    assert torch.equal(case.generate(), found)
    with pytest.raises(ValueError, match=r"enabled by gumbel with quantization='int8' already"):
        vargen.enable(case.model, "gumbel")
    with torch.no_grad():
        case.body.layers[0].mlp.down_proj.weight.mul_(-1)
    changed = case.generate()
    vargen.disable(case.model)
    vargen.enable(case.model, "ar", quantization="int8")
    assert torch.equal(case.generate(), changed) and not torch.equal(changed, found)
    vargen.disable(case.model)


def test_an_enabled_call_with_an_adapter_runs_by_the_original(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case("janus")
    vargen.enable(case.model, "ar", quantization="int8")
    attention = case.body.layers[0].self_attn
    attention.q_proj = LowRank(attention.q_proj)
    expected = type(case.model).generate(case.model, **case.inputs, **case.options)
    with caplog.at_level(logging.WARNING, "vargen"):
        assert torch.equal(case.generate(), expected)
    assert "layers like those of Llama" in caplog.text


def test_gelu_is_that_of_erf_to_its_last_digits() -> None:
    x = torch.linspace(-9, 9, 20001)
    expected = torch.nn.functional.gelu(x.double())
    assert (exact_erf_gelu(x) - expected).abs().max() < 4e-7
    assert torch.equal(exact_erf_gelu(x[7:12]), exact_erf_gelu(x)[7:12])
