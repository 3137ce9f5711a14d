"""`vargen.enable`: the calls of a user's own model give what they gave before, by fewer passes; and nothing else changes."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generate_cases import MAKERS, Case, emu3, glm, janus, make_case
from low_rank import LowRank
from tiny_language_models import PAD, has_release, make_chameleon, make_janus, needs_janus, randomize, text_config
from tiny_models import text_pipeline, text_var_pipeline

import vargen
from vargen.decoding import Sampling
from vargen.in_place.enabling import EnabledGenerate
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.transformers.base import ImageLanguageModel
from vargen.models.transformers.supported import MODELS, describe_language_model

pytestmark = needs_janus
CORE = ("ar", "gumbel", "auto", "sjd", "scd", "gsd")
SIZES = {"janus": [{}, {"side": 3, "codes": 40, "num_hidden_layers": 3, "num_key_value_heads": 4}],
         "emu3": [{}, {"rows": 3, "columns": 2, "codes": 31, "hidden_size": 64}],
         "glm-image": [{}, {"height": 96, "width": 64, "codes": 40, "num_hidden_layers": 1}]}  # fmt: skip
WITH_SIZES = [pytest.param(name, sizes, id=f"{name} {sizes}") for name in MAKERS for sizes in SIZES[name]]


@pytest.fixture(params=list(MAKERS))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def same(found: Any, expected: Any) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


# -- the same results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sizes"), WITH_SIZES)
def test_greedy_tokens_are_those_of_the_untouched_call(name: str, sizes: dict[str, Any]) -> None:
    case = make_case(name, **sizes)
    expected = case.generate()  # Janus keeps its cache
    before, attributes = case.model.generate, set(vars(case.model))
    assert min(len(set(row.tolist())) for row in expected) > 3, "no constant images"
    state = torch.get_rng_state()
    for method in CORE:
        assert vargen.enable(case.model, method) is case.model
        assert same(case.generate(), expected), method
        assert not vargen.summary(case.model).original
        vargen.disable(case.model)
    assert torch.equal(torch.get_rng_state(), state), "greedy calls draw nothing from the global generator"
    assert case.model.generate == before and set(vars(case.model)) == attributes


@pytest.mark.parametrize("method", ["gumbel", "scd"])
def test_sampled_calls_are_reproducible_and_gumbel_gives_the_tokens_of_ar(case: Case, method: str) -> None:
    found, count = {}, 2 if case.options.get("generation_mode") else 1  # transformers does not repeat all other inputs
    for name in ("ar", method):
        vargen.enable(case.model, name)
        for repeat in range(2):
            torch.manual_seed(7)
            found[name, repeat] = case.generate(do_sample=True, top_k=12, temperature=0.8, num_return_sequences=count)
        assert vargen.summary(case.model).calls == 2
        vargen.disable(case.model)
        assert same(found[name, 0], found[name, 1])
    assert len(found["ar", 0]) == count * 2
    if method == "gumbel":
        assert same(found["gumbel", 0], found["ar", 0])


def test_text_is_generated_as_before() -> None:
    model, processor = make_janus(seed=3)
    text = processor(text=["a cat on the moon"], generation_mode="text", return_tensors="pt")
    options = {"generation_mode": "text", "max_new_tokens": 8}
    torch.manual_seed(1)
    expected = model.generate(**text, **options, do_sample=True)
    vargen.enable(model)
    torch.manual_seed(1)
    assert same(model.generate(**text, **options, do_sample=True), expected)
    other = emu3()
    plain = other.model.generate(**other.inputs, max_new_tokens=8, do_sample=False)
    vargen.enable(other.model)
    assert same(other.model.generate(**other.inputs, max_new_tokens=8, do_sample=False), plain)
    assert vargen.summary(other.model).calls == 0


def test_a_dictionary_is_returned_where_it_is_asked_for(case: Case) -> None:
    expected = case.generate(return_dict_in_generate=True)
    vargen.enable(case.model)
    found = case.generate(return_dict_in_generate=True)
    assert type(found) is type(expected) and same(found.sequences, expected.sequences)


@pytest.mark.parametrize("end", [20, 25])
def test_sequences_end_where_they_sample_their_end(end: int) -> None:
    if not has_release("glm-image"):
        pytest.skip("GLM-Image came with transformers 5")
    case = glm()
    own = case.generate()[:, case.inputs["input_ids"].shape[1] :]
    case.options |= {"eos_token_id": [int(own[0, end]), int(own[1, end + 7])], "pad_token_id": PAD}
    expected = case.generate()
    assert expected.shape[1] < own.shape[1] + case.inputs["input_ids"].shape[1]
    vargen.enable(case.model)
    assert same(case.generate(), expected)


def test_ids_that_depend_on_sampled_ids_are_those_that_the_function_allows(caplog: pytest.LogCaptureFixture) -> None:
    case = emu3()
    allowed, ids = case.options["prefix_allowed_tokens_fn"], case.model.vocabulary_mapping.image_tokens
    plain = case.generate()
    often = int(plain[0, case.inputs["input_ids"].shape[1] :].mode().values)

    def depends(number: int, sequence: Any) -> Any:
        answer = allowed(number, sequence)
        return ids[:5] if len(answer) > 1 and int(sequence[-1]) == often else answer

    expected = case.generate(prefix_allowed_tokens_fn=depends)
    assert not torch.equal(expected, plain)
    vargen.enable(case.model)
    assert same(case.generate(prefix_allowed_tokens_fn=depends), expected)
    assert "depends on sampled ids" in caplog.text


def test_without_a_negative_prompt_guidance_uses_what_transformers_uses() -> None:
    case = emu3()
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        del case.options[name]
    for scale in (3.0, 1.0):
        expected = case.generate(guidance_scale=scale)
        vargen.enable(case.model)
        assert same(case.generate(guidance_scale=scale), expected)
        vargen.disable(case.model)


def test_another_model_joins_by_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal language model whose image ids are a range, on a grid without ends of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class MineForCausalLM(LlamaForCausalLM):
        pass

    class Mine(ImageLanguageModel):
        class_name, since = "MineForCausalLM", "4.49"

        def __init__(self, model: Any):
            super().__init__(model)
            self.body, self.ids = model.model, torch.arange(50, 74)
            self.vocab, self.grid = 24, (4, 5)

    monkeypatch.setitem(MODELS, Mine.class_name, Mine)
    model = randomize(MineForCausalLM(LlamaConfig(**text_config())), 3, 0.8)
    ids = torch.tensor([[PAD, 9, 12], [11, 12, 13]])
    options = {"prefix_allowed_tokens_fn": lambda *_: list(range(50, 74)), "max_new_tokens": 20, "do_sample": False}
    case = Case(model, {"input_ids": ids, "attention_mask": (ids != PAD).long()}, **options)
    expected = case.generate()
    for method in CORE:
        vargen.enable(model, method)
        assert same(case.generate(), expected) and vargen.summary(model).calls == 1
        vargen.disable(model)


@pytest.mark.parametrize("kind", ["tensor", "array", "range", "new list", "the same list"])
def test_ids_may_come_in_any_form_that_transformers_takes(kind: str) -> None:
    case = emu3()
    allowed, reused = case.options["prefix_allowed_tokens_fn"], list[int]()

    def changed(number: int, sequence: Any) -> Any:
        ids = list(allowed(number, sequence))
        reused[:] = ids
        forms = {"tensor": torch.tensor(ids), "array": np.array(ids), "new list": ids, "the same list": reused}
        return range(ids[0], ids[0] + 1) if kind == "range" and len(ids) == 1 else forms.get(kind, ids)

    case.options["prefix_allowed_tokens_fn"] = changed
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_a_function_that_fails_on_ids_that_are_not_sampled_runs_by_the_original() -> None:
    case = emu3()
    allowed, ids = case.options["prefix_allowed_tokens_fn"], case.model.vocabulary_mapping.image_tokens
    first = case.inputs["input_ids"].shape[1]
    sampled = {tuple(row[first : first + 2].tolist()) for row in case.generate()}

    def strict(number: int, sequence: Any) -> Any:
        assert len(sequence) < first + 2 or tuple(sequence[first : first + 2].tolist()) in sampled
        return allowed(number, sequence)

    assert min(ids) not in {pair[0] for pair in sampled}
    expected = case.generate(prefix_allowed_tokens_fn=strict)
    vargen.enable(case.model)
    assert same(case.generate(prefix_allowed_tokens_fn=strict), expected) and vargen.summary(case.model).calls == 0


# -- what runs by the original -------------------------------------------------------------------------------------------


class Forbid:
    """A logits processor that forbids an id."""

    def __call__(self, ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([3]), float("-inf"))


def make_processors() -> Any:
    from transformers import LogitsProcessorList

    return LogitsProcessorList([Forbid()])


ORIGINAL = {
    "logits_processor": make_processors,
    "repetition_penalty": lambda: 1.3,
    "typical_p": lambda: 0.5,
    "epsilon_cutoff": lambda: 0.02,
    "suppress_tokens": lambda: [1, 2],
    "no_repeat_ngram_size": lambda: 2,
    "top_p": lambda: 0.0,
}


@pytest.mark.parametrize("option", ORIGINAL)
def test_options_that_vargen_lacks_run_by_the_original(case: Case, option: str, caplog: pytest.LogCaptureFixture) -> None:
    def call() -> Any:
        torch.manual_seed(5)
        try:
            return case.generate(do_sample=True, top_k=12, **{option: ORIGINAL[option]()})
        except (RuntimeError, IndexError) as error:  # of transformers itself, such as for a typical p of few allowed ids
            return torch.tensor(list(str(error).encode()))

    expected = call()
    vargen.enable(case.model)
    with caplog.at_level(logging.WARNING, "vargen"):
        for _ in range(2):
            assert same(call(), expected)
    assert vargen.summary(case.model).original.total() == 2 and vargen.summary(case.model).calls == 0
    assert caplog.text.count("runs by the original generate") == 1


def test_beams_and_scores_run_by_the_original() -> None:
    case = emu3()
    case.options = {name: case.options[name] for name in ("prefix_allowed_tokens_fn", "max_new_tokens")}
    options = {"return_dict_in_generate": True, "output_scores": True}
    expected, beams = case.generate(**options), case.generate(num_beams=2)
    vargen.enable(case.model)
    assert len(case.generate(**options).scores) == len(expected.scores) and same(case.generate(num_beams=2), beams)


def test_configurations_are_read_as_generate_reads_them(case: Case) -> None:
    """Also those of the model, and top-k of 50, which transformers samples with unless a call names another."""
    from vargen.in_place.generate_calls import resolve_call

    config = case.model.generation_config
    plain = resolve_call(case.model, (), {**case.inputs, **case.options, "do_sample": True})
    assert plain.sampling.top_k == config.top_k == 50 or config.top_k is None
    config.do_sample, config.temperature, config.top_k = True, 0.7, 9
    for name in ("do_sample",):
        case.options.pop(name)
    found = resolve_call(case.model, (), {**case.inputs, **case.options, "top_p": 0.9, "min_p": 0.1})
    assert found.sampling == Sampling(0.7, 9, 0.9, 0.1)


def test_unknown_keywords_get_the_error_of_transformers(case: Case) -> None:
    with pytest.raises(ValueError) as expected:
        case.generate(unknown_word=1)
    vargen.enable(case.model)
    with pytest.raises(ValueError) as found:
        case.generate(unknown_word=1)
    assert str(found.value) == str(expected.value)


def test_training_mode_runs_by_the_original(case: Case) -> None:
    expected = case.generate()
    vargen.enable(case.model.train())
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 0
    case.model.eval()
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_guidance_that_janus_lacks_fails_as_before(scale: float) -> None:
    case = janus()
    with pytest.raises(RuntimeError) as expected:
        case.generate(guidance_scale=scale)
    vargen.enable(case.model)
    with pytest.raises(RuntimeError) as found:
        case.generate(guidance_scale=scale)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", ["janus", "emu3"])  # GLM-Image itself fails
def test_ids_of_32_bits(name: str) -> None:
    case = make_case(name)
    case.inputs["input_ids"] = case.inputs["input_ids"].int()
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_masks_with_holes_run_by_the_original(case: Case) -> None:
    case.inputs["attention_mask"] = case.inputs["attention_mask"].clone()
    case.inputs["attention_mask"][0, 2] = 0
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 0


def test_prompts_padded_on_the_right_run_by_the_original(case: Case) -> None:
    ids, mask = (case.inputs[name] for name in ("input_ids", "attention_mask"))
    case.inputs |= {
        "input_ids": torch.cat([ids, torch.full_like(ids[:, :1], PAD)], 1),
        "attention_mask": torch.cat([mask, torch.zeros_like(mask[:, :1])], 1),
    }
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 0


# -- the user's model ----------------------------------------------------------------------------------------------------


def test_changed_weights_are_used_by_the_next_call(case: Case) -> None:
    vargen.enable(case.model, "gumbel")
    case.generate()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(0.05)
    case.model.double()
    found = case.generate()
    vargen.disable(case.model)
    assert same(found, case.generate())


def test_adapters_on_layers_and_on_the_head_act(case: Case) -> None:
    plain = case.generate()
    vargen.enable(case.model)
    case.generate()
    attention = case.body.layers[0].self_attn
    attention.q_proj = LowRank(attention.q_proj)
    if case.options.get("generation_mode"):
        head = case.model.model.generation_head
        head.vision_head = LowRank(head.vision_head)
    else:
        case.model.lm_head = LowRank(case.model.lm_head)
    found = case.generate()
    vargen.disable(case.model)
    assert same(found, case.generate()) and not torch.equal(found, plain)


def test_peft_and_compiled_models_are_enabled_inside(case: Case) -> None:
    peft = pytest.importorskip("peft")
    expected = case.generate()
    adapted = peft.get_peft_model(
        case.model, peft.LoraConfig(target_modules=["q_proj"], lora_alpha=99, init_lora_weights=False)
    )
    changed = case.generate(adapted)
    assert not torch.equal(changed, expected)
    vargen.enable(adapted.eval())
    assert same(case.generate(adapted), changed) and vargen.summary(adapted).calls == 1
    with adapted.disable_adapter():
        assert same(case.generate(adapted), expected)
    merged = adapted.merge_and_unload()
    assert same(case.generate(merged), changed)


def test_a_compiled_model_is_enabled_inside(case: Case) -> None:
    expected, compiled = case.generate(), torch.compile(case.model)
    vargen.enable(compiled)
    assert same(case.generate(compiled), expected) and vargen.summary(case.model).calls == 1
    vargen.disable(compiled)
    assert "generate" not in vars(case.model)


class CpuOffload:
    """A hook with the name of accelerate's, which may stay."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def pre_forward(self, module: Any, *args: Any, **options: Any) -> Any:
        self.events.append("before")
        return args, options

    def post_forward(self, module: Any, output: Any) -> Any:
        self.events.append("after")
        return output


def test_offloading_that_begins_later_moves_the_weights_of_each_call(case: Case) -> None:
    expected, hook = case.generate(), CpuOffload()
    vargen.enable(case.model)
    case.model._hf_hook = hook
    assert same(case.generate(), expected) and not vargen.summary(case.model).original
    # The loop of Janus does not run this hook.
    assert hook.events == ([] if case.options.get("generation_mode") else ["before", "after"])


def edit_last(module: Any, args: Any, output: Any) -> Any:
    output[:, -1] += 1
    return output


def replace_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **options: forward(*args, **options)


def use_subclass(model: Any) -> None:
    class Mine(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **options: Any) -> Any:
            return super().generate(*args, **options)

    model.__class__ = Mine


CHANGES: dict[str, Callable[[Case], Any]] = {
    "a hook on a layer": lambda case: case.body.layers[0].mlp.register_forward_hook(edit_last),
    "a hook on the body": lambda case: case.body.register_forward_hook(lambda *_: None),
    "a forward of the body": lambda case: replace_forward(case.body),
    "a hook of accelerate": lambda case: setattr(case.body.layers[0], "_hf_hook", object()),
    "inputs of a pass": lambda case: setattr(
        case.model, "prepare_inputs_for_generation", partial(type(case.model).prepare_inputs_for_generation, case.model)
    ),
    "a subclass": lambda case: use_subclass(case.model),
    "layers of torch.ao": lambda case: torch.ao.quantization.quantize_dynamic(case.body, {torch.nn.Linear}, inplace=True),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changed_is_not_left_out(case: Case, change: str) -> None:
    CHANGES[change](case)
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected)
    assert vargen.summary(case.model).calls == 0 and vargen.summary(case.model).original.total() == 1


def test_a_compiled_body_stays_as_it_was(case: Case) -> None:
    expected = case.generate()
    owner = case.model.model
    name = next(name for name, each in owner.named_children() if each is case.body)
    setattr(owner, name, torch.compile(case.body))
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1
    assert set(dict(getattr(owner, name).named_children())) == {"_orig_mod"}
    vargen.disable(case.model)
    case.model.forward = torch.compile(case.model.forward)
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_a_hook_on_the_head_acts(case: Case) -> None:
    head = case.model.model.generation_head if case.options.get("generation_mode") else case.model.lm_head
    replace_forward(head)
    forward = head.forward
    head.forward = lambda hidden: forward(hidden).roll(1, -1)
    expected = case.generate()
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_copies_belong_to_their_own_weights(case: Case, tmp_path: Path) -> None:
    expected = case.generate()
    vargen.enable(case.model)
    for other in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        assert same(case.generate(other), expected) and vargen.summary(other).calls == 1
        assert vargen.summary(case.model).calls == 0
        with torch.no_grad():
            for parameter in case.model.parameters():
                parameter.mul_(1)  # its own, not the copy's
        vargen.disable(other)
        assert "generate" not in vars(other) and isinstance(vars(case.model)["generate"], EnabledGenerate)
    case.model.save_pretrained(tmp_path)
    opened = type(case.model).from_pretrained(tmp_path).eval()
    opened.generation_config = case.model.generation_config
    assert same(case.generate(opened), expected) and "generate" not in vars(opened)


def test_a_shallow_copy_is_enabled_and_disabled_by_itself(case: Case) -> None:
    vargen.enable(case.model)
    other = copy.copy(case.model)
    vargen.disable(other)
    assert "generate" not in vars(other) and "generate" in vars(case.model)
    other = copy.copy(case.model)
    vargen.enable(other, "scd")
    assert vargen.summary(other).method.name == "scd" and vargen.summary(case.model).method.name == "gumbel"
    vargen.disable(other)
    assert "generate" not in vars(other)
    del case.model.generate
    vargen.disable(case.model)
    vargen.enable(case.model, "ar")
    assert vargen.summary(case.model).method.name == "ar"


def test_a_model_is_freed_without_a_collection(case: Case) -> None:
    vargen.enable(case.model)
    case.generate()
    alive = weakref.ref(case.model)
    gc.collect()
    gc.disable()
    try:
        case.model = None
        assert alive() is None
    finally:
        gc.enable()


def test_enabling_allocates_nothing_and_a_call_leaves_nothing(case: Case) -> None:
    def count() -> int:
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if isinstance(each, torch.Tensor))

    case.generate()
    before = count()
    vargen.enable(case.model)
    assert count() == before
    case.generate()
    vargen.disable(case.model)
    assert count() == before


def test_two_threads_generate_what_each_alone_does(case: Case) -> None:
    expected = case.generate()
    vargen.enable(case.model)
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda number=number: found.update({number: case.generate()})) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(same(each, expected) for each in found.values()) and len(found) == 2
    assert vargen.summary(case.model).calls == 2


def test_an_exception_leaves_the_model_as_it_was(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.generate()
    vargen.enable(case.model)
    layer = type(case.body.layers[0].mlp)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            case.generate()
    assert same(case.generate(), expected)


# -- enable and disable --------------------------------------------------------------------------------------------------


def test_enabling_twice_and_disabling_twice() -> None:
    case = janus()
    vargen.enable(case.model, "gumbel", window=8)
    vargen.enable(case.model, "gumbel:window=8")
    with pytest.raises(ValueError, match="enabled by gumbel:window=8 already"):
        vargen.enable(case.model, "scd")
    own = vars(case.model)["generate"]
    case.model.generate = partial(own, top_k=3)
    with pytest.raises(ValueError, match="replaced after"):
        vargen.disable(case.model)
    case.model.generate = own
    vargen.disable(case.model)
    vargen.disable(case.model)
    with pytest.raises(ValueError, match="enabled"):
        vargen.summary(case.model)


def test_disabling_restores_the_attribute_that_was_there() -> None:
    case = janus()
    wrapper = partial(case.model.generate, guidance_scale=4.0)
    case.model.generate = wrapper
    vargen.enable(case.model)
    vargen.disable(case.model)
    assert vars(case.model)["generate"] is wrapper


def test_subclasses_are_enabled() -> None:
    case = janus()

    class Mine(type(case.model)):  # type: ignore[misc]
        pass

    expected, case.model.__class__ = case.generate(), Mine
    vargen.enable(case.model)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


@pytest.mark.parametrize(("make_pipe", "method"), [(text_pipeline, "scd"), (text_var_pipeline, "economy")])
def test_pipelines_of_vargen_get_a_default_method(make_pipe: Callable[[], Any], method: str) -> None:
    pipe = make_pipe()
    pipe.set_progress_bar_config(disable=True)
    before = pipe.default_method
    vargen.enable(pipe, method)
    assert pipe("a red apple", output_type="latent").stats.accelerator == method
    assert vargen.summary(pipe).calls == 1 and str(vargen.summary(pipe)).startswith(method)
    with pytest.raises(ValueError, match="enabled by"):
        vargen.enable(pipe, before)
    vargen.disable(pipe)
    vargen.disable(pipe)
    assert pipe.default_method == before and "default_method" not in vars(pipe)


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "an object without image ids": (lambda: torch.nn.Linear(2, 2), {}, "model must be one of"),
    "a number": (lambda: 3, {}, "model must be one of"),
    "a model whose generate masks images": (lambda: make_chameleon()[0], {}, "masks"),
    "an unknown method": (lambda: janus().model, {"method": "gumbell"}, "gumbel"),
    "a method of another paradigm": (lambda: janus().model, {"method": "code"}, "next-scale"),
    "an unknown setting": (lambda: janus().model, {"windw": 3}, "windw"),
    "a missing draft model": (lambda: janus().model, {"method": "speculative"}, "draft"),
    "missing heads": (lambda: janus().model, {"method": "eagle"}, "eagle"),
    "a draft model of another grid": (
        lambda: janus().model,
        {"method": "speculative", "draft_model": lambda: make_janus(side=3)[0]},
        "grid",
    ),
    "heads that are not there": (lambda: janus().model, {"method": "eagle", "drafter": "/no/such/folder"}, "folder"),
    "sliding windows": (lambda: change_attention(janus().model, "flex_attention"), {}, "sdpa"),
}


def change_attention(model: Any, name: str) -> Any:
    model.config.get_text_config()._attn_implementation = name
    return model


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_changes(what: str) -> None:
    make_model, given, message = BAD[what]
    model, options = make_model(), {name: value() if callable(value) else value for name, value in given.items()}
    with pytest.raises((ValueError, TypeError, OSError), match=message) as error:
        vargen.enable(model, **options)
    assert "\n" not in str(error.value)
    assert not isinstance(model, torch.nn.Module) or "generate" not in vars(model)


@pytest.mark.parametrize("method", ["eagle", "lantern", "medusa"])
def test_draft_heads_draft_for_janus(method: str, tmp_path: Path) -> None:
    case, kind = janus(), MedusaDrafter if method == "medusa" else EagleDrafter
    sizes = {"n_head": 2, "multiple_of": 8, "ffn_dim_multiplier": None, "norm_eps": 1e-5, "rope_base": 10000}
    settings = {**sizes, **describe_language_model(case.model).head_settings}
    kind(**{name: settings[name] for name in kind.target_settings}).save_pretrained(tmp_path)
    expected = case.generate()
    vargen.enable(case.model, method, drafter=tmp_path)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


@pytest.mark.parametrize("method", ["mulo", "mulo-exact"])
def test_the_preview_of_glm_image_drafts(method: str) -> None:
    case = make_case("glm-image")
    expected = case.generate()
    vargen.enable(case.model, method)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_a_smaller_model_drafts(case: Case) -> None:
    expected, small = case.generate(), copy.deepcopy(case.model)
    randomize(small, 8, 0.8)
    vargen.enable(case.model, "speculative", draft_model=small)
    assert same(case.generate(), expected) and vargen.summary(case.model).calls == 1


def test_what_is_supported_is_listed() -> None:
    found = vargen.supported()
    assert "JanusForConditionalGeneration" in found and not any("Chameleon" in name for name in found)


def test_a_pipeline_of_diffusers_returns_the_same_pixels() -> None:
    """GLM-Image with all parts, tiny; its own call, whose sampling `top_k=1` of the model's configuration makes greedy."""
    if not has_release("glm-image"):
        pytest.skip("GLM-Image came with transformers 5")
    from tiny_glm_pipeline import make_glm_pipeline

    pipe = make_glm_pipeline()
    call = partial(pipe, "a red apple", height=64, width=96, num_inference_steps=2, output_type="np")
    expected = call(generator=torch.Generator().manual_seed(5)).images
    for method in ("ar", "gumbel", "scd"):
        vargen.enable(pipe, method)
        assert (call(generator=torch.Generator().manual_seed(5)).images == expected).all()
        assert vargen.summary(pipe).calls == 1
        vargen.disable(pipe)
    assert "generate" not in vars(pipe.vision_language_encoder)
