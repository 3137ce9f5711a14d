"""Image language models of transformers: the tokens of their own `generate`, by every method, from real processors."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from summed_model import SummedModel
from tiny_language_models import make_chameleon, make_emu3, make_glm, make_janus, needs_janus, text_config

import vargen
from vargen.compat import installed_version
from vargen.decoding import PRESETS, Sampling, decode, list_methods
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.transformers import supported
from vargen.models.transformers.base import PromptRows
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.supported import Emu3, Janus, PreviewDrafter, describe_language_model
from vargen.training.generated_images import make_teacher
from vargen.verify.exact_sum import sum_pass

pytestmark = needs_janus
PROMPTS = ["a red apple", "a blue car on the moon", "dog"]
SIZE = (4, 5)  # of Emu3, in tokens
# Other numbers of heads, layers, widths and tokens pass without a change of code.
JANUS = [{}, {"side": 3, "codes": 40, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8},
         {"side": 5, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}]  # fmt: skip


@pytest.fixture(scope="module")
def janus() -> Any:
    return vargen.accelerate(*make_janus())


@pytest.fixture(scope="module")
def emu3() -> Any:
    return vargen.accelerate(*make_emu3(), size=SIZE)


@pytest.fixture(scope="module")
def glm() -> Any:
    if installed_version("transformers") < "5":
        pytest.skip("GLM-Image came with transformers 5")
    return vargen.accelerate(*make_glm(seed=1), size=(2, 3))  # other seeds have ties within rounding


@pytest.fixture(params=["janus", "emu3"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def rows(pipe: Any) -> PromptRows:
    return pipe.encode_condition(PROMPTS)[0]


def test_an_earlier_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Emu3ForConditionalGeneration"]}')
    monkeypatch.setattr(supported, "installed_version", lambda name: "4.52.4")
    with pytest.raises(ValueError, match=r"Emu3ForConditionalGeneration needs transformers 4\.53 or newer, got 4\.52\.4"):
        vargen.open_pipeline(tmp_path)


@pytest.mark.parametrize("sizes", JANUS, ids=str)
def test_greedy_tokens_of_janus_are_those_of_its_generate(sizes: dict[str, Any]) -> None:
    model, processor = make_janus(seed=3, **sizes)
    inputs = processor(text=PROMPTS, generation_mode="image", padding=True, padding_side="left", return_tensors="pt")
    expected = model.generate(
        inputs=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_mode="image",
        guidance_scale=5.0, do_sample=False, max_length=200,
    )  # fmt: skip
    found = vargen.accelerate(model, processor)(PROMPTS, temperature=0, output_type="latent")
    assert torch.equal(found.tokens, expected)


def emu3_generate(pipe: Any, number: int, processors: list[Any], **options: Any) -> torch.Tensor:
    """Image tokens by the model's own `generate`, as its documentation calls it."""
    model, ids, found = pipe.language_model.model, pipe.language_model.ids, rows(pipe)
    assert found.unconditional is not None
    own, negative = (each.ids[number][each.valid[number]][None] for each in (found, found.unconditional))
    start, (height, width) = own.shape[1], SIZE

    def allowed(batch: int, sequence: torch.Tensor) -> list[int]:
        ends = (len(sequence) - start + 1) % (width + 1) == 0
        return ids[-1:].tolist() if ends else ids[:-1].tolist()

    out = model.generate(
        own, attention_mask=torch.ones_like(own), negative_prompt_ids=negative,
        negative_prompt_attention_mask=torch.ones_like(negative), guidance_scale=3.0, do_sample=False,
        max_new_tokens=height * (width + 1), prefix_allowed_tokens_fn=allowed, logits_processor=processors, **options,
    )  # fmt: skip
    place = {token: index for index, token in enumerate(ids.tolist())}
    return torch.tensor([place[token] for token in out[0, start:].tolist()])


def test_greedy_tokens_of_emu3_are_those_of_its_generate(emu3: Any) -> None:
    found = emu3(PROMPTS, temperature=0, output_type="latent")
    assert found.images.shape[1:] == (SIZE[0], SIZE[1] + 1), "each row ends with its token"
    for number in range(len(PROMPTS)):
        assert torch.equal(found.tokens[number], emu3_generate(emu3, number, []))


def test_greedy_tokens_of_glm_image_are_those_of_its_generate(glm: Any) -> None:
    size = {"target_h": 64, "target_w": 96, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in PROMPTS]
    inputs = glm.processor.apply_chat_template(messages, tokenize=True, return_dict=True, processor_kwargs=size)
    known, N = glm.language_model, glm.language_model.grid[1]
    markers = list(range(known.vocab, known.vocab + 4))
    expected = known.model.generate(**inputs, do_sample=False, max_new_tokens=N, suppress_tokens=markers)[:, -N:]
    for method in ("ar", "gumbel", "recycle"):
        assert torch.equal(glm(PROMPTS, accelerator=method, temperature=0, output_type="latent").tokens, expected)


@pytest.mark.parametrize("swin_norm", [False, True])
def test_greedy_tokens_of_chameleon_are_those_of_its_own_network(swin_norm: bool) -> None:
    """Its `generate` masks image tokens, so the reference are passes over the whole sequence, with its own head."""
    model, processor = make_chameleon(swin_norm=swin_norm)
    pipe = vargen.accelerate(model, processor)
    ids, start = pipe.language_model.ids, processor.image_start_token_id
    found = pipe(PROMPTS[:2], accelerator="gumbel", temperature=0, guidance_scale=3.0, output_type="latent").tokens
    for prompt, row in zip(PROMPTS, found.tolist(), strict=False):
        text = processor(text=[prompt], return_for_text_completion=True)["input_ids"][0]
        contexts, tokens = [[*text, start], [start]], []
        for _ in range(16):
            logits = [model.lm_head(model.model(torch.tensor([each])).last_hidden_state[0, -1])[ids] for each in contexts]
            tokens.append(int((logits[1] + 3 * (logits[0] - logits[1])).argmax()))
            contexts = [[*each, int(ids[tokens[-1]])] for each in contexts]
        assert row == tokens
    with pytest.raises(ValueError, match="output_type"):
        pipe(PROMPTS[0])
    negative = pipe.encode_condition("dog", negative_prompt="a blue car")[0].unconditional
    assert negative is not None and negative.ids.shape[1] > 2 and negative.ids[0, -1] == start


def test_glm_image_returns_tokens_for_another_pipeline(glm: Any) -> None:
    found = glm(PROMPTS[0], output_type="latent", generator=torch.Generator().manual_seed(1))
    prior = glm.language_model.to_prior_tokens(found.tokens).view(4, 6)
    assert torch.equal(prior[::2, ::2], found.tokens[0, -6:].view(2, 3)) and torch.equal(prior[::2], prior[1::2])
    assert torch.equal(found.tokens, glm(PROMPTS[0], accelerator="ar", output_type="latent",
                                         generator=torch.Generator().manual_seed(1)).tokens)  # fmt: skip
    for arguments in ({"output_type": "pil"}, {"guidance_scale": 2.0, "output_type": "latent"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            glm(PROMPTS[0], **arguments)


def test_forced_tokens_are_not_counted(emu3: Any) -> None:
    stats = emu3(PROMPTS, accelerator="ar", output_type="latent").stats
    assert (stats.tokens, stats.forced) == (3 * 24, 3 * 4) and stats.tokens_per_pass == 20 / 24


NEXT_TOKEN = [preset.name for preset in list_methods("next-token")]
LOW_RES = ("mulo", "mulo-exact")


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Pipelines with all that a method may need: layers to skip, a draft model, and draft heads."""
    makers: dict[str, Any] = {"janus": (make_janus, None), "emu3": (make_emu3, SIZE)}
    if installed_version("transformers") >= "5":
        makers["glm"] = (partial(make_glm, seed=1), (2, 3))
    found = {}
    for name, (make, size) in makers.items():
        (model, processor), (small, _) = make(num_hidden_layers=4), make(num_hidden_layers=1)
        found[name] = vargen.accelerate(model, processor, small, size=size)
        settings = make_teacher(found[name]).settings
        for cls in (EagleDrafter, MedusaDrafter):
            folder = tmp_path_factory.mktemp(name)
            cls(**{each: settings[each] for each in cls.target_settings}).save_pretrained(folder)
            found[name].load_drafter(folder)
    return found


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in ("janus", "emu3") for name in NEXT_TOKEN]
    + [("glm", name) for name in (*LOW_RES, "layer-skip", "eagle-gumbel", "speculative")],
)
def test_every_preset_runs_or_says_why_not(equipped: dict[str, Any], model: str, name: str) -> None:
    if model not in equipped:
        pytest.skip("GLM-Image came with transformers 5")
    pipe, seeds = equipped[model], torch.arange(2)
    method = PRESETS[name]
    adapter, condition = pipe.decoding_model(1.0 if model == "glm" else 3.0), rows(pipe).select_rows([0, 1])
    if name in LOW_RES and model != "glm":
        with pytest.raises(ValueError, match="resolution"):
            decode(adapter, condition, seeds, method)
        return
    found = decode(adapter, condition, seeds, method)
    assert found.tokens.shape == (2, pipe.num_tokens) and found.stats.tokens_per_pass > 0.8
    if method.sequential_tokens:
        assert torch.equal(found.tokens, decode(adapter, condition, seeds, "ar").tokens)


@pytest.mark.parametrize(
    ("name", "described"),
    [("scd", "janus"), ("lookup", "janus"), ("recycle", "janus"), ("sjd", "emu3"), ("scd", "emu3"), ("pac", "emu3")],
)
def test_exact_rules_sum_to_the_model_s_distribution(name: str, described: str) -> None:
    """Also where a token is forced: the ends of two rows of Emu3."""
    model, processor = make_janus(side=2, codes=3) if described == "janus" else make_emu3(codes=2)
    description: Any = Janus(model) if described == "janus" else Emu3(model, size=(2, 1))
    condition = description.encode_prompts(processor, ["a red apple"], None)
    summed: Any = SummedModel(TransformersTokenModel(description, 3.0), condition)
    method = PRESETS[name]
    found = sum_pass(method, summed, passes=2, sampling=Sampling(1.2, top_p=0.9))
    assert max(found.distance, found.draft_distance) < 1e-5


def test_drafts_from_a_preview_are_exact() -> None:
    """A preview of two tokens, and an image of two, in the places of the four tokens of a Janus."""
    model, processor = make_janus(side=2, codes=3)
    description = Janus(model)
    summed: Any = SummedModel(
        TransformersTokenModel(description, 3.0), description.encode_prompts(processor, ["a red apple"], None)
    )
    summed.low_res = PreviewDrafter(3, (1, 2), (1, 2))
    summed.low_res.grid = summed.grid
    found = sum_pass(PRESETS["mulo-exact"], summed, passes=2, sampling=Sampling(1.2, top_p=0.9))
    assert max(found.distance, found.draft_distance) < 1e-5


# -- shared noise in the loops of transformers --------------------------------------------------------------------------


def test_tokens_of_emu3_s_own_loop_with_shared_noise_are_those_of_ar(emu3: Any, repo_root: Path) -> None:
    processor = runpy.run_path(str(repo_root / "examples" / "assisted_generation.py"))["SharedNoiseLogitsProcessor"]
    found, sampling = rows(emu3), Sampling(0.9, 12)
    seeds = torch.tensor([11, 12, 13])
    expected = decode(emu3.decoding_model(3.0), found, seeds, "ar", sampling).tokens
    for number in range(len(PROMPTS)):
        start = int(found.valid[number].sum())
        noise = processor(seeds[number], start, sampling, emu3.language_model.ids)
        assert torch.equal(emu3_generate(emu3, number, [noise]), expected[number])


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_other_models_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with pytest.raises(TypeError, match="model must be one of Janus"):
        vargen.accelerate(LlamaForCausalLM(LlamaConfig(**text_config())), None)
    with pytest.raises(TypeError):
        describe_language_model(make_janus()[0], size=(4, 4))


@pytest.mark.parametrize(("change", "argument"), [
    (lambda model: model.train(), "evaluation mode"),
    (lambda model: setattr(model.config.get_text_config(), "_attn_implementation", "flash_attention_2"), "attn_implementation"),
    (lambda model: setattr(model.config.get_text_config(), "_attn_implementation", "flex_attention"), "attn_implementation"),
    (lambda model: setattr(model.config.get_text_config(), "layer_types", ["sliding_attention"] * 2), "sliding_attention"),
], ids=["training", "flash", "flex", "sliding"])  # fmt: skip
def test_networks_that_do_not_fit_are_refused(change: Any, argument: str) -> None:
    model, processor = make_janus()
    change(model)
    with pytest.raises(ValueError, match=argument):
        vargen.accelerate(model, processor)
