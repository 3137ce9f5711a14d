"""Causal language models with image ids, Liquid, SimpleAR and Tar: the tokens of plain loops, by every method."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from summed_model import SummedModel
from tiny_language_models import make_causal, needs_janus

import vargen
from vargen.decoding import PRESETS, Sampling, decode, list_methods
from vargen.in_place.own_generate import generate_both
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.transformers.causal import Liquid
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.supported import IMAGE_MODELS
from vargen.training.generated_images import make_teacher
from vargen.verify.exact_sum import sum_pass

pytestmark = needs_janus
PROMPTS = ["a red apple", "a blue car on the moon", "dog"]
SIZES = {"liquid": (3, 4), "simplear": (4, 4), "tar": (9, 9)}
NEXT_TOKEN = [preset.name for preset in list_methods("next-token") if not preset.experimental]
# What the official programs write around a prompt, and before an image without one.
CHAT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = {
    "liquid": ("{} Generate an image based on this description.<boi>", "<unconditional><boi>"),
    "simplear": (
        "<|t2i|>A highly realistic image of {}<|soi|>",
        "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad "
        "eyes, bad limbs, distortion<|soi|>",
    ),
    "tar": (CHAT + "<im_start><S2>", None),
}
SCALES = {"liquid": 7.0, "simplear": 6.0, "tar": 1.0}


@pytest.fixture(scope="module", params=SIZES)
def pipe(request: pytest.FixtureRequest) -> Any:
    return open_tiny(request.param)


def open_tiny(name: str, **changed: Any) -> Any:
    return vargen.accelerate(*make_causal(name, **changed), size=SIZES[name])


def kind(pipe: Any) -> str:
    return pipe.language_model.name.lower()


def image_ids(pipe: Any) -> torch.Tensor:
    """As the official programs compute them: behind the tokenizer, or by their names in it."""
    if kind(pipe) == "tar":
        return torch.tensor([pipe.processor.convert_tokens_to_ids(f"<I{number}>") for number in range(24)])
    return len(pipe.processor) + torch.arange(24)


def official_tokens(pipe: Any, prompt: str) -> list[int]:
    """Greedy image tokens of the official loops: the guided logits of the image ids, over whole sequences without a cache."""
    ids, (text, blank), scale = image_ids(pipe), TEXTS[kind(pipe)], SCALES[kind(pipe)]
    contexts = [pipe.processor(each)["input_ids"] for each in (text.format(prompt), blank) if each is not None]
    found: list[int] = []
    for _ in range(pipe.num_tokens):
        logits = [pipe.model(torch.tensor([each])).logits[0, -1] for each in contexts]
        if kind(pipe) == "simplear":
            logits = [each.log_softmax(-1) for each in logits]
        guided = logits[0] if len(logits) == 1 else logits[1] + scale * (logits[0] - logits[1])
        found.append(int(guided[ids].argmax()))
        contexts = [[*each, int(ids[found[-1]])] for each in contexts]
    return found


@pytest.mark.parametrize("method", ["ar", "gumbel"])
def test_greedy_tokens_are_those_of_the_official_loops(pipe: Any, method: str) -> None:
    """Prompts of different length together, with the guidance of the published model."""
    found = pipe(PROMPTS, accelerator=method, temperature=0, output_type="latent").tokens
    for prompt, tokens in zip(PROMPTS, found.tolist(), strict=True):
        assert tokens == official_tokens(pipe, prompt)


def test_defaults_are_those_of_the_published_models(pipe: Any) -> None:
    expected = {"guidance_scale": SCALES[kind(pipe)], "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    expected |= {"liquid": {"temperature": 0.99, "top_p": 0.96}, "tar": {"top_p": 0.95}, "simplear": {}}[kind(pipe)]
    assert pipe.default_sampling == expected, "tiny models have fewer tokens than top-k"
    sizes = {each.name: (each.codes, each.published_size, each.top_k) for each in IMAGE_MODELS}
    assert sizes == {
        "Liquid": (8192, (32, 32), 4096), "SimpleAR": (64_000, (64, 64), None), "Tar": (0, (27, 27), 1200),
        "X-Omni": (0, (72, 72), None), "MammothModa2": (0, (32, 32), None),
        "Emu3.5": (0, (64, 64), 5120),
    }  # fmt: skip


@pytest.fixture(scope="module", params=SIZES)
def equipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With all that a method may need: a draft model and draft heads."""
    (model, tokenizer), (small, _) = (make_causal(request.param, num_hidden_layers=layers) for layers in (3, 1))
    pipe = vargen.accelerate(model, tokenizer, small, size=SIZES[request.param])
    for cls in (EagleDrafter, MedusaDrafter):
        folder, settings = tmp_path_factory.mktemp("head"), make_teacher(pipe).settings
        cls(**{each: settings[each] for each in cls.target_settings}).save_pretrained(folder)
        pipe.load_drafter(folder)
    return pipe


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_every_method_runs_or_says_why_not(equipped: Any, name: str) -> None:
    method, scale = PRESETS[name], 1.0 if kind(equipped) == "tar" else 3.0
    model, condition = equipped.decoding_model(scale), equipped.encode_condition(PROMPTS[:2])[0]
    missing = {"mulo": "resolution", "mulo-exact": "resolution", "lantern": "codebook", "lantern-jacobi": "codebook"}
    if name in missing:
        with pytest.raises(ValueError, match=missing[name]):
            decode(model, condition, torch.arange(2), method)
        return
    found = decode(model, condition, torch.arange(2), method)
    assert found.tokens.shape == (2, equipped.num_tokens) and found.tokens.max() < 24
    if method.sequential_tokens:
        assert torch.equal(found.tokens, decode(model, condition, torch.arange(2), "ar").tokens)


def test_a_smaller_model_drafts() -> None:
    (model, tokenizer), (small, _) = make_causal("tar", num_hidden_layers=3), make_causal("tar", num_hidden_layers=1, seed=1)
    pipe = vargen.accelerate(model, tokenizer, small, size=(9, 9))
    expected = pipe("dog", accelerator="ar", temperature=0, output_type="latent").tokens
    assert torch.equal(pipe("dog", accelerator="speculative", temperature=0, output_type="latent").tokens, expected)


def test_min_p_sums_to_the_model_s_distribution() -> None:
    model, tokenizer = make_causal("liquid", codes=4)
    described = Liquid(model, tokenizer, (2, 2))
    summed: Any = SummedModel(TransformersTokenModel(described, 3.0), described.encode_prompts(tokenizer, ["dog"], None))
    found = sum_pass(PRESETS["scd"], summed, passes=2, sampling=Sampling(1.2, top_k=3, min_p=0.1))
    assert max(found.distance, found.draft_distance) < 1e-5


def test_negative_prompts() -> None:
    pipe = open_tiny("simplear")
    found = pipe.encode_condition("dog", negative_prompt="a red car")[0].unconditional
    assert found is not None and found.ids[0].tolist() == pipe.processor("<|t2i|>a red car<|soi|>")["input_ids"]
    with pytest.raises(ValueError, match="negative_prompt must be None: Tar"):
        open_tiny("tar")("dog", negative_prompt="cat", output_type="latent")


# -- folders ------------------------------------------------------------------------------------------------------------


def test_a_folder_is_known_by_its_tokenizer(pipe: Any, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    opened = vargen.open_pipeline(tmp_path, size=SIZES[kind(pipe)], torch_dtype=torch.float32)
    assert type(opened.language_model) is type(pipe.language_model)
    options = {"temperature": 0, "output_type": "latent"}
    assert torch.equal(opened("dog", **options).tokens, pipe("dog", **options).tokens)


@pytest.mark.parametrize(("name", "marks"), [("liquid", "<boi> and <unconditional>"), ("tar", "<I0> and <S0> of Tar")])
def test_models_of_text_are_refused(name: str, marks: str, tmp_path: Path) -> None:
    model, _ = make_causal(name)
    _, other = make_causal("text")
    with pytest.raises(ValueError, match=f"ForCausalLM generates text: its tokenizer lacks .*{marks}"):
        vargen.accelerate(model, other)
    model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ForCausalLM generates text"):
        vargen.open_pipeline(tmp_path)
    with pytest.raises(TypeError, match="processor must be the tokenizer"):
        vargen.accelerate(model, None)


def test_models_that_do_not_fit_are_refused() -> None:
    model, tokenizer = make_causal("liquid", vocab_size=30)
    with pytest.raises(ValueError, match="model must embed image tokens"):
        vargen.accelerate(model, tokenizer)
    with pytest.raises(ValueError, match="size must be one of"):
        vargen.accelerate(*make_causal("tar"), size=(8, 8))
    broken, names = make_causal("tar")
    names.add_tokens(["<I25>", "<I24>"])
    broken.resize_token_embeddings(len(names))
    with pytest.raises(ValueError, match="consecutive ids"):
        vargen.accelerate(broken, names)


# -- in place -------------------------------------------------------------------------------------------------------------


def test_generate_is_accelerated_where_image_ids_are_allowed(pipe: Any) -> None:
    """As `vargen check` calls it, with guidance; a call without allowed ids generates text, as before."""
    own, enabled = generate_both(pipe, "a red apple", pipe.num_tokens)
    assert own.tolist() == enabled.tolist() == official_tokens(pipe, "a red apple")
    text = {"input_ids": pipe.processor("dog", return_tensors="pt")["input_ids"], "max_new_tokens": 4, "do_sample": False}
    expected = pipe.model.generate(**text)
    vargen.enable(pipe.model)
    assert torch.equal(pipe.model.generate(**text), expected) and vargen.summary(pipe.model).calls == 0
    vargen.disable(pipe.model)


def test_text_encoders_of_a_pipeline_are_left_alone() -> None:
    encoder = make_causal("text")[0]
    with pytest.raises(TypeError, match="model must be one of"):
        vargen.enable(SimpleNamespace(components={"text_encoder": encoder}))
    assert vargen.supported().keys() >= {"GemmaForCausalLM", "Qwen2ForCausalLM"}


def test_int8_layers_run_at_any_width_for_qwen_and_not_for_gemma() -> None:
    pipe = vargen.accelerate(*make_causal("simplear"), size=(4, 4), quantization="int8")
    options = {"temperature": 0, "output_type": "latent"}
    assert torch.equal(pipe(PROMPTS, **options).tokens, pipe(PROMPTS, accelerator="ar", **options).tokens)
    with pytest.raises(ValueError, match="quantization"):
        vargen.accelerate(*make_causal("liquid"), size=(4, 4), quantization="int8")
