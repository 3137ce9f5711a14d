"""What every mode of the page reads: the prompt, the start buttons beside it, style chips, and the folded Advanced settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gradio as gr

from vargen.demo.image_service import ImageService
from vargen.demo.method_lists import MethodList, build_method_list
from vargen.demo.modes import ModeButtons, build_mode_buttons
from vargen.demo.rendering import hint
from vargen.demo.request import MAX_CANDIDATES, MAX_IMAGES, MAX_PROMPT, MAX_SEED, PageRequest, new_seed
from vargen.values import OPTIONS, Option

ANY_STYLE = "any"
EXAMPLE = "a hamburger"  # also that of the recorded race


@dataclass(frozen=True)
class Subject:
    """What every mode reads, and its buttons.

    Attributes:
        buttons: those that start and stop a job, by mode.
        lock: whether to keep the seed. once: set when a seed came with a link or an image: the next job takes it.
    """

    seed_index: ClassVar[int] = 2  # of the seed in `values`

    prompt: gr.Textbox
    buttons: dict[str, ModeButtons]
    style: gr.Radio
    seed: gr.Number
    lock: gr.Checkbox
    once: gr.Checkbox

    @property
    def values(self) -> list[Any]:
        return [self.prompt, self.style, self.seed]


@dataclass(frozen=True)
class Inputs:
    """What modes read that generate with the image model: `methods`, `count` and `best` are those of the Image mode."""

    subject: Subject
    guidance: gr.Slider
    temperature: gr.Slider
    top_k: gr.Number
    top_p: gr.Slider
    negative: gr.Textbox
    methods: MethodList
    count: gr.Dropdown
    best: gr.Dropdown

    @property
    def sampling(self) -> list[Any]:
        """The inputs that follow those of the subject, in the order of `make_request`."""
        return [self.guidance, self.temperature, self.top_k, self.top_p, self.negative]


def make_request(
    service: ImageService, values: Sequence[Any], method: str, num_images: int = 1, best_of: int = 1
) -> PageRequest:
    """Return the checked request from the values of the page."""
    prompt, style, seed, guidance, temperature, top_k, top_p, negative = values
    prompt = with_style(prompt, style, service.styles)
    request = PageRequest(prompt, method, seed, guidance, temperature, top_k, top_p, negative, num_images, best_of)
    service.check(request)
    return request


def with_style(prompt: Any, style: Any, styles: Sequence[str]) -> Any:
    """Append the style to a prompt that does not name it, in place of another one of `styles` at its end."""
    words = f"{style} style"
    if style and style != ANY_STYLE and isinstance(prompt, str) and prompt.strip() and words not in prompt.lower():
        return f"{split_style(prompt.strip(), styles)[0]}, {words}"
    return prompt


def split_style(prompt: str, styles: Sequence[str]) -> tuple[str, str]:
    """Return a prompt and its style apart: "a red apple, flat style" is "a red apple" and "flat"."""
    for style in styles:
        if prompt.endswith(f", {style} style"):
            return prompt.removesuffix(f", {style} style"), style
    return prompt, ANY_STYLE


def build_inputs(service: ImageService, modes: Sequence[str]) -> Inputs:
    """Lay out the inputs of the page of an image model."""
    prompt, buttons, style = build_top(modes, service.styles, service.class_names if service.by_class else None)
    with gr.Accordion("Advanced settings", open=False, elem_id="advanced"):
        subject = Subject(prompt, buttons, style, *build_seed())
        return Inputs(subject, *_build_sampling(service), *_build_image_options(service))


def build_top(
    modes: Sequence[str], styles: Sequence[str] = (), class_names: Sequence[str] | None = None, example: str = EXAMPLE
) -> tuple[gr.Textbox, dict[str, ModeButtons], gr.Radio]:
    """Lay out the prompt, the buttons beside it and the styles; with `class_names`, the prompt is a class."""
    with gr.Row(elem_id="top"):
        prompt = gr.Textbox(
            label="Prompt" if class_names is None else "Class",
            show_label=False,
            container=False,
            placeholder="Describe what to generate" if class_names is None else "The name or number of a class",
            value=example if class_names is None else "".join(class_names[:1]) or "0",
            lines=1,
            max_lines=4,
            max_length=MAX_PROMPT,
            elem_id="prompt",
            autofocus=True,
            scale=1,
        )
        buttons = build_mode_buttons(modes)
    style = gr.Radio(
        [(f"{each} style", each) for each in (ANY_STYLE, *styles)], value=ANY_STYLE, label="Style", show_label=False,
        container=False, visible=bool(styles), elem_id="style", elem_classes="chips",
    )  # fmt: skip
    chips: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    prompt.input(None, [prompt, style], style, js="(...values) => window.vargen.styleOf(...values)", **chips)
    style.input(None, [prompt, style], prompt, js="(prompt) => window.vargen.withoutStyle(prompt)", **chips)
    return prompt, buttons, style


def build_seed() -> tuple[gr.Number, gr.Checkbox, gr.Checkbox]:
    """Lay out the seed, whether to keep it, and the mark of a seed that the next job takes."""
    with gr.Row(elem_id="seed-row"):
        seed = gr.Number(label="Seed", value=new_seed(), precision=0, min_width=140, scale=2, elem_id="seed")
        lock = gr.Checkbox(
            label="Keep this seed", info="Otherwise each run takes a new one.", elem_id="lock", min_width=180, scale=2
        )
        dice = gr.Button("New seed", size="md", min_width=110, scale=1, elem_id="dice")
    once = gr.Checkbox(visible=False)
    dice.click(new_seed, outputs=seed, queue=False, show_progress="hidden", api_visibility="private")
    seed.input(lambda: True, None, once, queue=False, show_progress="hidden", api_visibility="private")
    return seed, lock, once


def _build_sampling(service: ImageService) -> tuple[gr.Slider, gr.Slider, gr.Number, gr.Slider, gr.Textbox]:
    defaults = service.defaults
    with gr.Row():
        guidance, temperature = _slider("guidance_scale", defaults), _slider("temperature", defaults)
    with gr.Row():
        top_k = gr.Number(defaults["top_k"], precision=0, label=OPTIONS["top_k"].label, info=_info(OPTIONS["top_k"]))
        top_p = _slider("top_p", defaults)
    negative = gr.Textbox(
        label="Negative prompt", info="What guidance leads away from", max_length=MAX_PROMPT, visible=not service.by_class,
    )  # fmt: skip
    return guidance, temperature, top_k, top_p, negative


def _build_image_options(service: ImageService) -> tuple[MethodList, gr.Dropdown, gr.Dropdown]:
    with gr.Group(elem_id="image-options"):
        with gr.Row():
            count = gr.Dropdown(
                [(f"{n} image{'s' if n > 1 else ''}", n) for n in range(1, MAX_IMAGES + 1)],
                value=1, label="Images", min_width=130, elem_id="count",
            )  # fmt: skip
            best = gr.Dropdown(
                [("one", 1), *((f"best of {n}", n) for n in (2, 4, MAX_CANDIDATES))],
                value=1, label="Candidates", min_width=130, elem_id="best", visible=service.scorer is not None,
            )  # fmt: skip
        methods = build_method_list(
            gr.Radio, service.available, service.default_method, "Method", elem_id="method",
            elem_classes="methods",
        )  # fmt: skip
        unavailable = [
            f"{each.name} ({each.unsupported_reason.split(': ')[0]})"
            for each in service.methods.values()
            if each.unsupported_reason is not None
        ]
        if unavailable:
            gr.HTML(hint(f"This model cannot run: {'; '.join(unavailable)}."), padding=True)
    return methods, count, best


def _slider(name: str, defaults: dict[str, Any]) -> gr.Slider:
    option = OPTIONS[name]
    least, most, step = option.slider
    return gr.Slider(least, most, defaults[name], step=step, label=option.label, info=_info(option))


def _info(option: Option) -> str:
    return option.help[0].upper() + option.help[1:]


def fill_subject(subject: Subject, request: PageRequest) -> dict[Any, Any]:
    """Return the updates that take prompt and seed of a request over."""
    prompt, style = split_style(request.prompt, [value for _, value in subject.style.choices])
    return {subject.prompt: prompt, subject.style: style, subject.seed: min(request.seed, MAX_SEED), subject.once: True}


def fill_inputs(inputs: Inputs, request: PageRequest) -> dict[Any, Any]:
    """Return the updates that take a request over: its seed is used once."""
    sampling = [request.guidance_scale, request.temperature, request.top_k, request.top_p, request.negative_prompt]
    found = {**fill_subject(inputs.subject, request), **dict(zip(inputs.sampling, sampling, strict=True))}
    return {**found, **inputs.methods.select(request.method)}


def filled_inputs(inputs: Inputs) -> list[Any]:
    """The outputs of an event that returns what `fill_inputs` does."""
    return [*inputs.subject.values, inputs.subject.once, *inputs.sampling, inputs.methods.choice]
