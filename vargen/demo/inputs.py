"""The input column of the page: the prompt, the seed, the sampling parameters, and a drop box for an image."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.demo import rendering as figures
from vargen.demo.image_service import Engine
from vargen.demo.jobs import Runs, told_plainly
from vargen.demo.request import LONGEST_PROMPT, MAX_SEED, NEW_SEEDS, Settings, read_parameters, settings_of
from vargen.options import OPTIONS, Option

ANY_STYLE = "any"
START = "vg-start"  # class of the button that Enter in the prompt presses
# For immediate events that may report an error: gradio delivers messages to the page only through the queue.
TALKING: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
# For events that only update the page.
QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
EXAMPLES = (
    "a red apple", "a red heart", "a star", "sunflower", "a strawberry", "a Christmas tree", "a sailboat",
    "a house, 3d style", "flag of ireland, flat style",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The components that every tab reads, in the order expected by `settings`."""

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
        """The inputs of an event whose function passes them to `settings`."""
        return [
            self.prompt, self.style, self.seed, self.guidance, self.temperature, self.top_k, self.top_p, self.negative,
        ]  # fmt: skip


def settings(engine: Engine, values: tuple[Any, ...], method: str, num_images: int = 1, num_candidates: int = 1) -> Settings:
    """Return the checked settings from the values of the page.

    Raises:
        ValueError: with a message for users.
    """
    prompt, style, seed, guidance, temperature, top_k, top_p, negative = values
    words = f"{style} style"
    if style and style != ANY_STYLE and isinstance(prompt, str) and prompt.strip() and words not in prompt.lower():
        prompt = f"{prompt.strip()}, {words}"
    found = Settings(prompt, method, seed, guidance, temperature, top_k, top_p, negative, num_images, num_candidates)
    engine.check(found)
    return found


def new_seed() -> int:
    return secrets.randbelow(NEW_SEEDS)


def build(engine: Engine) -> Inputs:
    """Lay out the inputs."""
    chosen = engine.defaults
    prompt = gr.Textbox(
        label="Class" if engine.by_class else "Prompt",
        info="A class's name or number" if engine.by_class else None,
        placeholder="207" if engine.by_class else "a red apple",
        value="" if engine.by_class else EXAMPLES[0],
        lines=1,
        max_lines=4,
        max_length=LONGEST_PROMPT,
        elem_id="prompt",
        autofocus=True,
    )
    style = gr.Radio(
        [ANY_STYLE, *engine.styles], value=ANY_STYLE, label="Style", visible=bool(engine.styles), elem_id="style",
        elem_classes="chips",
    )  # fmt: skip
    examples = engine.class_names[:8] if engine.by_class else list(EXAMPLES)
    with gr.Row(elem_id="examples"):
        for example in examples:
            button = gr.Button(example, size="sm", min_width=0, elem_classes="example")
            button.click(None, None, prompt, js=f"() => {json.dumps(example)}", api_visibility="private")
    with gr.Group():
        with gr.Row(elem_id="seed-row"):
            seed = gr.Number(label="Seed", value=new_seed(), precision=0, min_width=140, scale=3, elem_id="seed")
            dice = gr.Button("⚄ New seed", size="md", min_width=120, scale=1, elem_id="dice")
        lock = gr.Checkbox(
            label="Keep this seed", info="Else every drawing takes a new one. A seed is a picture.", elem_id="lock"
        )
    with gr.Accordion("Sampling", open=False, elem_id="sampling"):
        guidance, temperature = _slider("guidance_scale", chosen), _slider("temperature", chosen)
        top_k = gr.Number(
            chosen["top_k"], precision=0, label=OPTIONS["top_k"].label, info=_info(OPTIONS["top_k"]) + "; 0 keeps all"
        )
        top_p = _slider("top_p", chosen)
        negative = gr.Textbox(
            label="Negative prompt", info="What guidance leads away from", max_length=LONGEST_PROMPT,
            visible=not engine.by_class,
        )  # fmt: skip
    dropped = gr.File(
        label="Parameters from a PNG drawn here", file_types=[".png"], type="filepath", height=120, elem_id="drop"
    )
    dice.click(new_seed, outputs=seed, queue=False, show_progress="hidden", api_visibility="private")
    return Inputs(prompt, style, seed, guidance, temperature, top_k, top_p, negative, lock, dropped)


def _slider(name: str, chosen: dict[str, Any]) -> gr.Slider:
    option = OPTIONS[name]
    least, most, step = option.slider
    return gr.Slider(least, most, chosen[name], step=step, label=option.label, info=_info(option))


def _info(option: Option) -> str:
    return option.help[0].upper() + option.help[1:]


def other_drawer(engine: Engine, method: str, model: object) -> str:
    """Explain in one sentence why an image's parameters give another image here; empty if they give the same."""
    if model not in (None, engine.name):
        return f"The model {model} drew the picture: this one draws another with them."
    if method not in {each.name for each in engine.available}:
        return f"The method {method} drew the picture, and is not in the list: the one that is chosen may draw another."
    return ""


def reload_on_drop(engine: Engine, inputs: Inputs, method: gr.Radio, note: gr.HTML) -> None:
    """Connect the drop box: the parameters of a dropped image fill the page, and its seed is locked."""
    outputs = [*inputs.values, inputs.lock, method, note]

    def reload(path: str | None) -> list[Any]:
        if path is None:
            return [gr.skip()] * len(outputs)
        with told_plainly():
            parameters = read_parameters(path)
            defaults = {**engine.defaults, "method": engine.available[0].name}
            found = settings_of(parameters, defaults)
        listed = found.method in {each.name for each in engine.available}
        drawn_by = gr.Radio(value=found.method) if listed else gr.skip()
        if other := other_drawer(engine, found.method, parameters.get("model")):
            gr.Warning(figures.text(other))
        news = figures.note(f"Parameters reloaded. {other or 'Generate draws the same picture.'}")
        values = [
            found.prompt, ANY_STYLE, min(found.seed, MAX_SEED), found.guidance_scale, found.temperature, found.top_k,
            found.top_p, found.negative_prompt,
        ]  # fmt: skip
        return [*values, True, drawn_by, news]

    inputs.dropped.upload(reload, inputs.dropped, outputs, **TALKING)


def idle() -> list[Any]:
    """Return the updates that enable the start button and disable the stop button."""
    return [gr.Button(interactive=True), gr.Button(interactive=False)]


def stopper(runs: Runs) -> Callable[[str], list[Any]]:
    """Return the handler of a stop button: a waiting run leaves the queue, and an active one is asked to stop."""

    def ask_to_stop(number: str) -> list[Any]:
        if runs.stop(number):
            return [figures.note("Taken out of the queue."), *idle()]
        return [figures.note("Stopping …"), gr.skip(), gr.skip()]

    return ask_to_stop
