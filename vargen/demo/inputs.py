"""The input column of the page: the prompt, the seed, the sampling parameters, a drop box for an image, and method lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gradio as gr

from vargen.decoding import PRESETS
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import INSTANT_EVENT, QUEUED_EVENT, user_errors
from vargen.demo.rendering import status_line, text
from vargen.demo.request import MAX_PROMPT, MAX_SEED, PageRequest, new_seed, read_parameters, request_from_metadata
from vargen.options import OPTIONS, Option
from vargen.pipelines.base import MethodInfo

ANY_STYLE = "any"
EXAMPLES = (
    "a red apple", "a red heart", "a star", "sunflower", "a strawberry", "a Christmas tree", "a sailboat",
    "a house, 3d style", "flag of ireland, flat style",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The components that every tab reads."""

    seed_index: ClassVar[int] = 2  # of the seed in `values`

    prompt: gr.Textbox
    style: gr.Radio
    seed: gr.Number
    guidance: gr.Slider
    temperature: gr.Slider
    top_k: gr.Number
    top_p: gr.Slider
    negative: gr.Textbox
    lock: gr.Checkbox
    dropped: gr.File

    @property
    def values(self) -> list[Any]:
        """The inputs of an event whose function passes them to `make_request`, in its order."""
        return [
            self.prompt, self.style, self.seed, self.guidance, self.temperature, self.top_k, self.top_p, self.negative,
        ]  # fmt: skip


def make_request(
    service: ImageService, values: Sequence[Any], method: str, num_images: int = 1, best_of: int = 1
) -> PageRequest:
    """Return the checked request from the values of the page.

    Raises:
        ValueError: with a message for users.
    """
    prompt, style, seed, guidance, temperature, top_k, top_p, negative = values
    words = f"{style} style"
    if style and style != ANY_STYLE and isinstance(prompt, str) and prompt.strip() and words not in prompt.lower():
        prompt = f"{prompt.strip()}, {words}"
    request = PageRequest(prompt, method, seed, guidance, temperature, top_k, top_p, negative, num_images, best_of)
    service.check(request)
    return request


def build_inputs(service: ImageService) -> Inputs:
    """Lay out the inputs."""
    defaults = service.defaults
    prompt = gr.Textbox(
        label="Class" if service.by_class else "Prompt",
        info="A class's name or number" if service.by_class else None,
        placeholder="207" if service.by_class else "a red apple",
        value="" if service.by_class else EXAMPLES[0],
        lines=1,
        max_lines=4,
        max_length=MAX_PROMPT,
        elem_id="prompt",
        autofocus=True,
    )
    style = gr.Radio(
        [ANY_STYLE, *service.styles], value=ANY_STYLE, label="Style", visible=bool(service.styles), elem_id="style",
        elem_classes="chips",
    )  # fmt: skip
    examples = service.class_names[:8] if service.by_class else list(EXAMPLES)
    with gr.Row(elem_id="examples"):
        for example in examples:
            button = gr.Button(example, size="sm", min_width=0, elem_classes="example")
            button.click(None, None, prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
    with gr.Group():
        with gr.Row(elem_id="seed-row"):
            seed = gr.Number(label="Seed", value=new_seed(), precision=0, min_width=140, scale=3, elem_id="seed")
            dice = gr.Button("⚄ New seed", size="md", min_width=120, scale=1, elem_id="dice")
        lock = gr.Checkbox(
            label="Keep this seed",
            info="Otherwise each run takes a new one. The same seed gives the same image.",
            elem_id="lock",
        )
    with gr.Accordion("Sampling", open=False, elem_id="sampling"):
        guidance, temperature = _slider("guidance_scale", defaults), _slider("temperature", defaults)
        top_k = gr.Number(
            defaults["top_k"], precision=0, label=OPTIONS["top_k"].label, info=_info(OPTIONS["top_k"]) + "; 0 keeps all"
        )
        top_p = _slider("top_p", defaults)
        negative = gr.Textbox(
            label="Negative prompt", info="What guidance leads away from", max_length=MAX_PROMPT,
            visible=not service.by_class,
        )  # fmt: skip
    dropped = gr.File(
        label="Reload parameters: drop a PNG from here", file_types=[".png"], type="filepath", height=120, elem_id="drop"
    )
    dice.click(new_seed, outputs=seed, queue=False, show_progress="hidden", api_visibility="private")
    return Inputs(prompt, style, seed, guidance, temperature, top_k, top_p, negative, lock, dropped)


def _slider(name: str, defaults: dict[str, Any]) -> gr.Slider:
    option = OPTIONS[name]
    least, most, step = option.slider
    return gr.Slider(least, most, defaults[name], step=step, label=option.label, info=_info(option))


def _info(option: Option) -> str:
    return option.help[0].upper() + option.help[1:]


def describe_mismatch(service: ImageService, method: str, model: object) -> str:
    """Explain in one sentence why an image's parameters give another image here; empty if they give the same."""
    if model not in (None, service.name):
        return f"The image is from the model {model}; this model generates another one."
    if method not in {each.name for each in service.available}:
        return f"The image is from the method {method}, which is not available here; another method may give another image."
    return ""


@dataclass(frozen=True)
class MethodList:
    """A list of methods to choose from, core ones first, and the checkbox that adds the experimental ones, if there are any."""

    choice: gr.Radio | gr.CheckboxGroup | gr.Dropdown
    more: gr.Checkbox
    choices: Callable[[bool], list[tuple[str, str]]]


def build_method_list(
    component: type[Any], methods: Sequence[MethodInfo], describe: Callable[[MethodInfo], str], more_id: str, **options: Any
) -> MethodList:
    """Lay out a list of methods; experimental ones are hidden until the checkbox below it is checked.

    Args:
        component: such as `gr.Radio`. describe: the label of a method. options: of the component; `value` is selected first.
    """
    core = [each for each in methods if not PRESETS[each.name].experimental]

    def choices(more: bool) -> list[tuple[str, str]]:
        return [(describe(each), each.name) for each in (methods if more else core)]

    def update(more: bool, selected: Any) -> Any:
        listed = choices(bool(more))
        names = {name for _, name in listed}
        if isinstance(selected, list):
            return component(choices=listed, value=[name for name in selected if name in names])
        return component(choices=listed, value=selected if selected in names else options["value"])

    choice = component(choices(False), **options)
    count = len(methods) - len(core)
    more = gr.Checkbox(label=f"More methods ({count} experimental)", visible=count > 0, elem_id=more_id, container=False)
    more.change(update, [more, choice], choice, **INSTANT_EVENT)
    return MethodList(choice, more, choices)


def reload_on_drop(service: ImageService, inputs: Inputs, methods: MethodList, note: gr.HTML) -> None:
    """Connect the drop box: the parameters of a dropped image fill the page, and its seed is locked."""
    outputs = [*inputs.values, inputs.lock, methods.more, methods.choice, note]

    def reload(path: str | None) -> list[Any]:
        if path is None:
            return [gr.skip()] * len(outputs)
        with user_errors():
            parameters = read_parameters(path)
            defaults = {**service.defaults, "method": service.available[0].name}
            found = request_from_metadata(parameters, defaults)
        lists: list[Any] = [gr.skip(), gr.skip()]
        if found.method in {name for _, name in methods.choices(False)}:
            lists = [gr.skip(), gr.Radio(value=found.method)]
        elif found.method in {name for _, name in methods.choices(True)}:
            lists = [True, gr.Radio(choices=methods.choices(True), value=found.method)]
        if mismatch := describe_mismatch(service, found.method, parameters.get("model")):
            gr.Warning(text(mismatch))
        news = status_line(f"Parameters reloaded. {mismatch or 'Generate gives the same image.'}")
        values = [
            found.prompt, ANY_STYLE, min(found.seed, MAX_SEED), found.guidance_scale, found.temperature, found.top_k,
            found.top_p, found.negative_prompt,
        ]  # fmt: skip
        return [*values, True, *lists, news]

    inputs.dropped.upload(reload, inputs.dropped, outputs, **QUEUED_EVENT)
