"""What language models return, against passes over whole sequences that are computed here, without cache or padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_language_models import make_glm, make_janus, needs_janus

import vargen
from vargen.compat import installed_version
from vargen.decoding import Engine, Sampling, decode
from vargen.decoding.decode import compute_log_probs
from vargen.kernels.ops import filter_logits
from vargen.models.transformers.supported import PreviewDrafter, preview_size

pytestmark = needs_janus
PROMPTS = ["a red apple", "dog", "a blue car on the moon under the green cat"]


@pytest.fixture(scope="module")
def janus() -> Any:
    model, processor = make_janus()
    return vargen.accelerate(model.double(), processor)


def teacher_forced(pipe: Any, prompts: list[str], tokens: torch.Tensor, scale: float, last: int | None = None) -> torch.Tensor:
    """Guided logits `[B, N, V]` of Janus: u + s (c - u) for each token, up to the token after decoding step `last`."""
    model, tokenizer, found = pipe.model, pipe.processor.tokenizer, []
    kept = {tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.boi_token)}
    for prompt, row in zip(prompts, tokens, strict=True):
        ids = torch.as_tensor(pipe.processor(text=[prompt], generation_mode="image")["input_ids"][0])
        blank = torch.tensor([token if token in kept else tokenizer.pad_token_id for token in ids.tolist()])
        image = model.prepare_embeddings_for_image_generation(row[None, :-1])
        both = []
        for each in (ids, blank):
            embeddings = torch.cat([model.get_input_embeddings()(each)[None], image], 1)
            hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
            both.append(model.model.generation_head(hidden[0, len(ids) - 1 :]))
        conditional, unconditional = both
        factor = torch.full((len(row), 1), scale, dtype=torch.float64)
        if last is not None:
            factor[last + 2 :] = 1.0  # decoding step 0 is the one that returns the second token
        found.append(unconditional + factor * (conditional - unconditional))
    return torch.stack(found)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0].float()


@pytest.mark.parametrize("candidates", [1, 3])
@torch.no_grad()
def test_log_probs_are_those_of_a_teacher_forced_pass(janus: Any, candidates: int) -> None:
    """Of the selected candidate of each prompt, with temperature and filter in one of the two and without in the other."""
    scores, sampling = iter([0.0, 2.0, 1.0, 5.0, 4.0, 3.0, 0.0, 1.0, 2.0] * 2), Sampling(0.6, top_k=9)
    options: dict[str, Any] = {"guidance_scale": 3.0, "return_log_probs": True, "output_type": "latent"}
    if candidates > 1:
        scorer = lambda images, prompts: torch.tensor([next(scores) for _ in images])  # noqa: E731
        options |= {"num_candidates": candidates, "scorer": scorer}
    generator, prompts = torch.Generator().manual_seed(4), [prompt for prompt in PROMPTS for _ in range(2)]
    found = janus(
        PROMPTS, num_images_per_prompt=2, accelerator="gumbel", generator=generator, temperature=0.6, top_k=9, **options
    )
    logits = teacher_forced(janus, prompts, found.tokens, 3.0)
    expected = log_probs(filter_logits(logits / 0.6, 9, 1.0), found.tokens), log_probs(logits, found.tokens)
    model, condition = janus.decoding_model(3.0), janus.encode_condition(prompts)[0]
    in_parts = compute_log_probs(model, condition, found.tokens, sampling, width=5)
    for given in ((found.log_probs, found.plain_log_probs), in_parts):
        for each, wanted in zip(given, expected, strict=True):
            torch.testing.assert_close(each.float(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("last", [0, 5, 13, None])
@torch.no_grad()
def test_guidance_ends_with_the_last_step_of_its_interval(janus: Any, last: int | None) -> None:
    options = {"guidance_interval": last, "return_log_probs": True, "output_type": "latent"}
    for method in ("ar", "gumbel"):
        found = janus(PROMPTS, accelerator=method, temperature=0, **options)
        logits = teacher_forced(janus, PROMPTS, found.tokens, 5.0, last)
        assert torch.equal(found.tokens, logits.argmax(-1)), method
        torch.testing.assert_close(found.plain_log_probs, log_probs(logits, found.tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_prompt_joins_the_row_of_a_longer_one(janus: Any, guidance: float) -> None:
    """As the service submits them: each prompt is encoded alone and takes a row that a longer one has left."""
    model, prompts = janus.decoding_model(guidance), [PROMPTS[2], *PROMPTS, PROMPTS[1]]
    engine = Engine(model, "gumbel:window=4", batch_size=2)
    for number, prompt in enumerate(prompts):
        engine.submit(janus.encode_condition([prompt])[0], torch.tensor([number]), Sampling(0.8))
    found = {image.number: image for image in engine.run()}
    for number, prompt in enumerate(prompts):
        alone = decode(model, janus.encode_condition([prompt])[0], torch.tensor([number]), "ar", Sampling(0.8))
        assert found[number].error is None and torch.equal(found[number].tokens, alone.tokens[0]), prompt
    calls = [
        janus(prompts, accelerator="scd:window=3", batch_size=size, guidance_scale=guidance, output_type="latent",
              generator=[torch.Generator().manual_seed(number) for number in range(5)]).tokens
        for size in (None, 2)
    ]  # fmt: skip
    assert torch.equal(*calls)
    engine = Engine(model, "ar", batch_size=2)
    for number, prompt in enumerate(PROMPTS[1:]):  # the longer one is second, and has no room
        engine.submit(janus.encode_condition([prompt])[0], torch.tensor([number]))
    found = {image.number: image for image in engine.run()}
    assert found[0].error is None and isinstance(found[1].error, ValueError)


# -- the preview of GLM-Image -----------------------------------------------------------------------------------------------


def test_a_draft_is_the_token_of_the_preview_at_the_same_place() -> None:
    """Also where rows and columns of the image are different multiples of those of its preview."""
    for preview, size in (((2, 3), (5, 4)), ((3, 2), (4, 6)), ((4, 1), (3, 5))):
        (r, c), (R, C) = preview, size
        expected = [int(y * r / R) * c + int(x * c / C) for y in range(R) for x in range(C)]
        found = PreviewDrafter(5, preview, size).source(torch.arange(r * c + R * C))
        assert found.tolist() == [-1] * (r * c) + expected


@pytest.mark.parametrize(("size", "preview"), [((32, 32), (16, 16)), ((16, 64), (8, 32)), ((3, 2), (19, 13))])
def test_a_preview_has_the_proportions_of_its_image(size: tuple[int, int], preview: tuple[int, int]) -> None:
    assert preview_size(size) == preview


@pytest.mark.skipif(installed_version("transformers") < "5", reason="GLM-Image came with transformers 5")
@pytest.mark.parametrize("size", [(2, 3), (3, 2), (1, 5)])
def test_previews_are_those_that_the_processor_asks_for(size: tuple[int, int]) -> None:
    model, processor = make_glm()
    message = [{"role": "user", "content": [{"type": "text", "text": "dog"}]}]
    options = {"target_h": 32 * size[0], "target_w": 32 * size[1]}
    found = processor.apply_chat_template([message], tokenize=True, return_dict=True, processor_kwargs=options)
    described = vargen.accelerate(model, processor, size=size).language_model
    grids = [list(map(int, grid)) for grid in found["image_grid_thw"]]
    assert grids == [[1, *size], [1, *described.preview]] and described.grid == (1, sum(a * b for _, a, b in grids))
