"""The distribution of sampled images of an enabled model is that of the untouched `generate`: both are summed, not sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import Case, emu3, glm, janus
from summed_model import SummedModel
from tiny_language_models import has_release, needs_janus, randomize

import vargen
from vargen.decoding import Sampling
from vargen.decoding.methods import resolve_method
from vargen.decoding.sampling import to_probs
from vargen.decoding.tree_drafters import DynamicTree, Eagle
from vargen.in_place.generate_calls import resolve_call
from vargen.in_place.image_calls import ImagePlan, plan_call
from vargen.models.guidance import Guidance
from vargen.models.heads.network import EagleDrafter
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.supported import describe_language_model
from vargen.verify.exact_sum import sum_pass

pytestmark = needs_janus
PROMPT = ["a red apple"]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 4, "top_p": 0.95, "min_p": 0.2}


def small_glm(**sizes: Any) -> Case:
    if not has_release("glm-image"):
        pytest.skip("GLM-Image came with transformers 5")
    found = glm(prompts=PROMPT, codes=1, **sizes)
    found.options["max_new_tokens"] = 3
    return found


def small_janus() -> Case:
    found = janus(side=2, prompts=PROMPT, codes=3)
    randomize(found.model, 0)
    return found


def small_emu3() -> Case:
    found = emu3(rows=2, columns=1, prompts=PROMPT, codes=2)
    found.options["max_new_tokens"] = 4
    return found


CASES: dict[str, Callable[[], Case]] = {
    "janus": small_janus,
    "emu3": small_emu3,
    "glm-image": small_glm,
}


def plan(case: Case) -> ImagePlan:
    options = {**case.inputs, **case.options, **SAMPLED}
    return plan_call(describe_language_model(case.model), resolve_call(case.model, (), options))


def sum_generate(case: Case, found: ImagePlan, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The distribution of the untouched `generate`: the probabilities from which it samples each possible image."""
    description = found.description
    N, step, probs = description.grid[0] * description.grid[1], 0, []
    images = torch.cartesian_prod(*[torch.arange(description.vocab)] * N)
    ids = images if description.ids is None else description.ids[images]

    def follow(given: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        nonlocal step
        probs.append(given.gather(1, ids[:, step : step + 1]).double())
        step += 1
        return ids[:, step - 1 : step]

    inputs = {name: each.repeat_interleave(len(images), 0) for name, each in case.inputs.items() if "grid" not in name}
    if "image_grid_thw" in case.inputs:
        inputs["image_grid_thw"] = case.inputs["image_grid_thw"].repeat(len(images), 1)
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if name in case.options:
            inputs[name] = case.options[name].repeat_interleave(len(images), 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", follow)
        case.generate(**{**inputs, **SAMPLED})
    return torch.cat(probs, 1).prod(1).view([description.vocab] * N)


@pytest.mark.parametrize("name", CASES)
def test_the_target_is_the_distribution_of_the_untouched_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where transformers was given top-k, top-p, temperature, guidance and allowed ids."""
    case = CASES[name]()
    found = plan(case)
    model = SummedModel(TransformersTokenModel(found.description, Guidance(found.call.guidance_scale)), found.rows)
    own = model.joint(0, lambda logits: to_probs(logits, found.sampling))
    expected = sum_generate(case, found, monkeypatch)
    assert abs(float(expected.sum()) - 1) < 1e-5 and float((own - expected).abs().sum()) / 2 < 1e-5
    other = model.joint(0, lambda logits: to_probs(logits, Sampling(1.8, found.sampling.top_k, 0.95, 0.2)))
    assert float((other - expected).abs().sum()) / 2 > 1e-3, "another temperature would be seen"


@pytest.mark.parametrize(
    ("name", "method"),
    [("janus", "ar"), ("janus", "scd"), ("janus", "eagle"), ("emu3", "ar"), ("emu3", "scd"), ("glm-image", "scd")],
)
def test_methods_sum_to_the_target(name: str, method: str, tmp_path: Path) -> None:
    case = CASES[name]()
    heads = {}
    if method == "eagle":
        settings = TransformersTokenModel(describe_language_model(case.model)).description.head_settings
        sizes = {"n_head": 2, "multiple_of": 8, "ffn_dim_multiplier": None, "norm_eps": 1e-5, "rope_base": 10000}
        EagleDrafter(**{**sizes, **settings}).save_pretrained(tmp_path)
        heads["drafter"] = tmp_path
    chosen = resolve_method(method)
    if method == "eagle":  # a small tree, for its sum
        chosen = replace(chosen, drafter=Eagle(shape=DynamicTree(nodes=3, depth=2, children=2, frontier=1)))
    vargen.enable(case.model, chosen, **heads)
    enabled, found = vars(case.model)["generate"], plan(case)
    model: Any = SummedModel(enabled.token_model(found.description, Guidance(found.call.guidance_scale)), found.rows)
    passes = 1 if method == "eagle" else 2
    summed = sum_pass(enabled.summary.method, model, passes=passes, sampling=found.sampling, max_drafts=200_000)
    assert max(summed.distance, summed.draft_distance) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gumbel_gives_the_tokens_of_ar_whose_sum_is_the_target(name: str) -> None:
    case, found = CASES[name](), {}
    for method in ("ar", "gumbel"):
        vargen.enable(case.model, method)
        torch.manual_seed(3)
        found[method] = torch.cat([case.generate(**SAMPLED) for _ in range(50)])
        vargen.disable(case.model)
    assert torch.equal(found["gumbel"], found["ar"]) and len(found["ar"].unique(dim=0)) > 1
