"""Image language models of transformers in use: memory, layers, draft heads, devices, the command line, bad folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from recorded_graph import RecordedGraph, captured_passes
from tiny_language_models import make_emu3, make_glm, make_janus, needs_janus
from typer.testing import CliRunner

import vargen
from vargen.cli.main import app
from vargen.compat import installed_version
from vargen.decoding import Accelerator, decode, shared_noise, speculative_sampling
from vargen.decoding.experimental import LayerSkip
from vargen.kernels import dispatch
from vargen.models.heads.network import MedusaDrafter
from vargen.pipelines.language_model import LanguageModelPipeline
from vargen.pipelines.loading import inspect_model, open_pipeline
from vargen.training.generated_images import Prompts
from vargen.training.heads import HeadConfig, train_head
from vargen.training.loop import Schedule

pytestmark = needs_janus
needs_accelerate = pytest.mark.skipif(installed_version("accelerate") is None, reason="accelerate is not installed")
PROMPTS = ["a red apple", "dog"]


def make(name: str, **changed: Any) -> LanguageModelPipeline:
    """A pipeline of a class, by the name of its model."""
    if name == "janus":
        return vargen.accelerate(*make_janus(**changed))
    if name == "emu3":
        return vargen.accelerate(*make_emu3(**changed), size=(4, 5))
    if installed_version("transformers") < "5":
        pytest.skip("GLM-Image came with transformers 5")
    return vargen.accelerate(*make_glm(seed=1, **changed), size=(2, 3))


MODELS = ["janus", "emu3", "glm"]


def sample(pipe: LanguageModelPipeline, method: Any, **options: Any) -> Any:
    generators = [torch.Generator().manual_seed(number) for number in range(len(PROMPTS))]
    return pipe(PROMPTS, accelerator=method, generator=generators, output_type="latent", **options)


# -- memory and layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_passes_can_be_captured_as_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for no value within a pass, and the state of a pass is a tree of tensors at fixed places."""
    pipe = make(name)
    monkeypatch.setattr(dispatch, "EAGER_CPU", False)  # takes the passes of a GPU
    monkeypatch.setattr(RecordedGraph, "made", 0)
    inputs = pipe.decoding_model(), pipe.encode_condition(PROMPTS)[0], torch.arange(2), "gumbel"
    with captured_passes():
        found = decode(*inputs)
    assert torch.equal(found.tokens, decode(*inputs).tokens) and RecordedGraph.made == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_some_layers_drafts_for_itself(name: str) -> None:
    pipe = make(name, num_hidden_layers=4)
    model, (condition, _) = pipe.decoding_model(), pipe.encode_condition(PROMPTS)
    method = Accelerator("skip", LayerSkip(3, shared_noise=True, skip="1+2"), shared_noise)
    found = sample(pipe, method)
    assert torch.equal(found.tokens, sample(pipe, "ar").tokens)
    assert found.stats.tokens_per_pass > 1 and sample(pipe, "layer-skip").tokens.shape == found.tokens.shape
    view = model.skip_layers([1, 2])
    cache = view.start(condition, 4)[0]
    assert len(cache.k) == 2, "a view has a cache for its own layers only"
    assert len(pipe.language_model.body.layers) == 4, "the model is unchanged"
    for wrong in ([4], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="layers"):
            model.skip_layers(wrong)


# -- draft heads ------------------------------------------------------------------------------------------------------------


def train(pipe: LanguageModelPipeline, kind: str, folder: Path) -> dict[str, float]:
    schedule = Schedule(steps=2, learning_rate=1e-2, warmup_steps=1)
    config = HeadConfig(
        model={"above": True} if kind == "eagle" else {"heads": 3, "blocks": 1}, schedule=schedule, num_images=12,
        validation_images=4, generation_batch_size=8, batch_size=8, evaluate_every=100,
    )  # fmt: skip
    return train_head(kind, config, pipe, Prompts(pipe, PROMPTS, ["a cat"], "words"), folder)


@pytest.mark.parametrize(("name", "kind"), [("janus", "eagle"), ("emu3", "medusa"), ("glm", "medusa")])
def test_draft_heads_are_trained_loaded_and_saved(name: str, kind: str, tmp_path: Path) -> None:
    pipe = make(name)
    metrics = train(pipe, kind, tmp_path / "run")
    assert 0 < metrics["acceptance_1"] <= 1 and metrics["tokens_per_pass"] >= 1
    assert pipe.load_drafter(tmp_path / "run") == kind
    plain = sample(pipe, "ar").tokens
    if kind == "eagle":
        found = sample(pipe, "eagle-gumbel")
        assert torch.equal(found.tokens, plain) and found.stats.tokens_per_pass > 1
    assert sample(pipe, kind).tokens.shape == plain.shape
    if name == "janus":
        pipe.save_pretrained(tmp_path / "model")
        again = open_pipeline(tmp_path / "model")
        assert list(again.draft_heads) == [kind] and kind in inspect_model(tmp_path / "model").draft_heads
        again.processor = pipe.processor  # whose tokenizer transformers 5 rebuilds as a Llama's
        assert torch.equal(sample(again, "eagle-gumbel").tokens, plain)


@pytest.mark.parametrize("change", ["dim", "vocab_size", "grid_size", "target"])
def test_draft_heads_of_another_model_are_refused(change: str, tmp_path: Path) -> None:
    pipe = make("janus")
    settings = pipe.language_model.head_settings
    settings[change] = "0" * 16 if change == "target" else settings[change] + 4
    MedusaDrafter(**settings).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=change):
        pipe.load_drafter(tmp_path)
    with pytest.raises(ValueError, match="low_res"):
        pipe.load_drafter("emoji/low_res/transformer")
    assert not pipe.draft_heads


# -- devices, dtypes, offloading, quantization ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "janus"
    make("janus").save_pretrained(path)
    return path


@needs_accelerate
@pytest.mark.parametrize(("name", "how"), [("janus", "cpu"), ("janus", "disk"), ("emu3", "cpu"), ("glm", "cpu")])
def test_offloaded_models_generate_the_same_tokens(name: str, how: str, tmp_path: Path) -> None:
    from accelerate import cpu_offload, disk_offload

    plain, pipe = make(name, num_hidden_layers=3), make(name, num_hidden_layers=3)
    model = pipe.model
    if how == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    options = {} if name == "janus" else {"size": pipe.language_model.size}
    offloaded = vargen.accelerate(model, pipe.processor, **options)
    for method in ("gumbel", "lantern-jacobi"):
        if name != "glm" or method == "gumbel":
            assert torch.equal(sample(offloaded, method).tokens, sample(plain, method).tokens), method
    if plain.language_model.has_pixels:
        pixels = [each(PROMPTS[0], temperature=0, output_type="pt").images for each in (plain, offloaded)]
        assert torch.allclose(*pixels, atol=1e-5)
    with pytest.raises(ValueError, match="hooks"):
        sample(offloaded, Accelerator("skip", LayerSkip(3, skip="1"), speculative_sampling))
    with pytest.raises(ValueError, match="drafter"):
        offloaded.load_drafter(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_cast_or_changed_later_is_used_as_it_is(name: str) -> None:
    pipe = make(name)
    before = sample(pipe, "ar", temperature=0).tokens
    pipe.to(torch.bfloat16)
    cast = sample(pipe, "gumbel", temperature=0)
    assert pipe.decoding_model().dtype == torch.bfloat16 and cast.tokens.shape == before.shape
    model = pipe.decoding_model()
    with torch.no_grad():
        state, out = model.start(pipe.encode_condition(PROMPTS)[0], 4)
        exact = make(name).decoding_model().start(pipe.encode_condition(PROMPTS)[0], 4)[1]
    assert state.k.dtype == torch.bfloat16 and out.logits.dtype == torch.float32
    assert torch.allclose(out.logits, exact.logits, atol=0.1 * float(exact.logits.std()))
    with torch.no_grad():
        for parameter in pipe.to(torch.float32).model.parameters():
            parameter.mul_(-1)
    assert not torch.equal(sample(pipe, "ar", temperature=0).tokens, before)


@needs_accelerate
def test_a_dtype_and_a_device_map_are_those_of_transformers(folder: Path) -> None:
    pipe = open_pipeline(folder, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert pipe.model.dtype == torch.bfloat16 and sample(pipe, "gumbel").tokens.shape == (2, 16)
    assert open_pipeline(folder, attn_implementation="eager").model.config.get_text_config()._attn_implementation == "eager"
    with pytest.raises(ValueError, match="device_map"):
        open_pipeline(folder, device="cpu", device_map={"": "cpu"})
    for option in ("trust_remote_code", "custom_pipeline"):
        with pytest.raises(ValueError, match=option):
            open_pipeline(folder, **{option: True})
    with pytest.raises(TypeError, match="vqvae"):
        open_pipeline(folder, vqvae=None)


@needs_accelerate
@pytest.mark.skipif(installed_version("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_quantization_without_its_package_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BitsAndBytesConfig

    monkeypatch.setattr("safetensors.torch.load_file", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ImportError, match="bitsandbytes"):
        open_pipeline(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    path = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_config(path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ImportError, match="bitsandbytes"):
        open_pipeline(path)


class IntegerLinear(torch.nn.Module):
    """A linear layer with rows of int8, as packages of quantization put in the place of a linear layer."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.scale = torch.nn.Parameter(linear.weight.detach().abs().amax(1) / 127)
        weight = (linear.weight.detach() / self.scale[:, None]).round().to(torch.int8)
        self.weight, self.bias = torch.nn.Parameter(weight, requires_grad=False), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ (self.weight.to(x.dtype) * self.scale[:, None]).T
        return out if self.bias is None else out + self.bias


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_integers_run_also_where_a_part_of_the_head_is_used(name: str) -> None:
    pipe = make(name)
    for module in list(pipe.model.modules()):
        for child, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear:
                setattr(module, child, IntegerLinear(layer))
    options = {} if name == "janus" else {"size": pipe.language_model.size}
    again = vargen.accelerate(pipe.model, pipe.processor, **options)
    assert torch.equal(sample(again, "gumbel").tokens, sample(again, "ar").tokens)


# -- the command line and the page ------------------------------------------------------------------------------------------


def test_the_command_line_generates_with_a_folder_of_transformers(folder: Path, tmp_path: Path) -> None:
    arguments = ["a red apple", "--model", str(folder), "--seed", "4", "-n", "2", "--json", "-o", f"{tmp_path}/out/"]
    result = CliRunner().invoke(app, ["generate", *arguments, "--accelerator", "gumbel"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [image["seed"] for image in document["images"]] == document["stats"]["seeds"] == [4, 5]
    assert document["model"] == "janus" and document["guidance_scale"] == 5 and document["stats"]["tokens"] == 32
    generator = torch.Generator().manual_seed(5)
    pipe = vargen.open_pipeline(folder)
    with Image.open(document["images"][1]["file"]) as image:
        assert list(image.getdata()) == list(pipe("a red apple", accelerator="ar", generator=generator).images[0].getdata())


def test_the_same_call_as_other_pipelines(folder: Path) -> None:
    pipe = open_pipeline(folder)
    seen: list[int] = []

    def after_pass(_: Any, step: int, done: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(done)
        return {"stop": len(seen) == 3}

    stopped = pipe(PROMPTS[0], accelerator="ar", callback_on_step_end=after_pass, output_type="np")
    assert stopped.stats.stopped and seen == [1, 2, 3] and (stopped.images[:, -2:] == 1).all(), (
        "white where nothing is generated"
    )
    best = pipe(PROMPTS, num_candidates=3, scorer=lambda images, _: images.mean((1, 2, 3)), return_log_probs=True)
    assert len(best.stats.scores[0]) == 3 and best.log_probs.shape == best.tokens.shape == (2, 16)
    assert pipe(PROMPTS[0], return_dict=False)[0][0].size == best.images[0].size
    assert {method.name for method in pipe.list_methods() if method.unsupported_reason is None} >= {"ar", "gumbel", "scd"}
    assert [image.mode for image in pipe.preview(best.tokens, 5)] == ["RGBA"] * 2


# -- folders that do not fit --------------------------------------------------------------------------------------------------


def change_config(path: Path, **changed: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def read_part(path: Path, name: str) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())[name]


@pytest.mark.parametrize(("spoil", "word"), [
    (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 40), "safetensors"),
    (lambda path: change_config(path, text_config=read_part(path, "text_config") | {"max_position_embeddings": 9}), "context"),
    (lambda path: change_config(path, text_config="llama"), r"config\.json"),
    (lambda path: [file.unlink() for file in path.glob("*token*")], "processor"),
    (lambda path: (path / "config.json").unlink(), "model_index.json"),
    (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "safetensors"),
    (lambda path: change_config(path, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
], ids=["damaged", "short context", "no text model", "no processor", "no config", "pickle", "other class"])  # fmt: skip
def test_folders_are_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, word: str
) -> None:
    from transformers import PreTrainedModel

    path = Path(shutil.copytree(folder, tmp_path / "copy"))
    spoil(path)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    for opens in (open_pipeline, inspect_model):
        with pytest.raises(ValueError, match=word):
            opens(path)


def test_processors_of_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    (janus, _), (_, other) = make_janus(), make_emu3()
    with pytest.raises(TypeError, match="processor must be a JanusProcessor"):
        vargen.accelerate(janus, other)
    path = Path(shutil.copytree(folder, tmp_path / "copy"))
    for file in path.glob("*token*"):
        file.unlink()
    for file in path.glob("*processor*"):
        file.unlink()
    other.save_pretrained(path)
    with pytest.raises((TypeError, ValueError), match="processor"):
        open_pipeline(path)
    small, processor = make_janus(vocab_size=30)
    with pytest.raises(ValueError, match="30 tokens"):
        vargen.accelerate(small, processor)


def test_a_draft_model_of_other_tokens_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    make("janus", codes=25).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="draft_model must have the vocab"):
        open_pipeline(folder, draft_model=tmp_path)


def test_a_folder_opens_as_the_model_in_memory_with_a_draft_model(folder: Path) -> None:
    opened = open_pipeline(folder, draft_model=folder)
    in_memory = vargen.accelerate(make_janus()[0], opened.processor)  # whose tokenizer transformers 5 rebuilds as a Llama's
    assert torch.equal(sample(opened, "ar", temperature=0).tokens, sample(in_memory, "ar", temperature=0).tokens)
    assert sample(opened, "speculative", temperature=0).stats.tokens_per_pass > 3
