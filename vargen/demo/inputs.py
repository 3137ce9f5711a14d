"""What every mode reads: prompt, style and seed; and the sampling settings and the choice of a method of image modes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from vargen.decoding import PRESETS
from vargen.demo.links import MAX_PROMPT, MAX_SEED
from vargen.pipelines.base import VisualPipeline
from vargen.values import OPTIONS

Values = Mapping[Any, Any]  # of components
Updates = dict[Any, Any]  # of components
ANY_STYLE = "any"
COPY_LINK = "(link) => { navigator.clipboard.writeText(new URL(link, location.href).href); }"
# Methods by what they mean for a visitor. Of those with the same words, the first that the model supports is offered.
SPEEDS = {
    "gumbel": ("Fast", "the same image as Slow"),
    "auto": ("Fast", "the same image as Slow"),
    "mulo": ("Fewest steps", "another image, often less good"),
    "ar": ("Slow", "one token per step"),
    "code": ("Fast", "fine details by a smaller model"),
    "plain": ("Slow", "all by the large model"),
    "sdvg": ("Fast", "a small model drafts, and the large one redoes what falls short"),
    "target": ("Slow", "all by the large model"),
}


@dataclass(frozen=True)
class Mode:
    """One tab of the page.

    Attributes:
        verb: on the start button.
        run: yields updates of `outputs` for the values of all inputs, and in the end of the link.
        inputs: read by `run`, beside those that all modes share. note: says how far a run is.
        set_method: returns the updates that choose a method; ValueError for one that the model has not.
        on_open: like `run`, when a visitor opens the tab.
    """

    verb: str
    run: Callable[[Values], Iterator[Updates]]
    inputs: list[Any]
    outputs: list[Any]
    note: gr.Markdown
    set_method: Callable[[str], Updates] = field(default=lambda name: {})
    on_open: Callable[[Values], Iterator[Updates]] | None = None


@dataclass(frozen=True)
class Shared:
    """What all modes read: `sampling` by the names of the pipeline's arguments, `link` to the latest result."""

    prompt: gr.Textbox
    style: gr.Radio
    seed: gr.Number
    sampling: dict[str, Any]
    link: gr.Textbox

    def read_prompt(self, values: Values) -> str:
        """Return the prompt with its style."""
        prompt = " ".join((values[self.prompt] or "").split())
        if not prompt:
            raise ValueError("Type a prompt first, for example: a red apple")
        if len(prompt) > MAX_PROMPT:
            raise ValueError(f"The prompt has {len(prompt)} characters; at most {MAX_PROMPT} are allowed here.")
        style = values[self.style]
        return prompt if style == ANY_STYLE or " style" in prompt else f"{prompt}, {style} style"

    def read_values(self, values: Values) -> dict[str, Any]:
        """Return the sampling settings as the page holds them."""
        return {name: values[component] for name, component in self.sampling.items()}

    def read_sampling(self, values: Values, pipe: VisualPipeline) -> dict[str, Any]:
        """Return the sampling settings as arguments of a call."""
        found = self.read_values(values)
        negative = found.pop("negative_prompt")
        # None would select the checkpoint's default.
        return {**found, "top_k": found["top_k"] or pipe.vocab_size, **({"negative_prompt": negative} if negative else {})}


def new_seed() -> int:
    return secrets.randbelow(2**32)


def build_shared(pipe: VisualPipeline, prompt: gr.Textbox, style: gr.Radio) -> tuple[Shared, gr.Checkbox]:
    """Lay out seed and sampling; returns also the box that keeps the seed."""
    defaults = pipe.default_sampling
    with gr.Row():
        seed = gr.Number(new_seed(), label="Seed", precision=0, minimum=0, maximum=MAX_SEED, elem_id="seed")
        keep = gr.Checkbox(label="Keep this seed", info="Otherwise each run takes a new one.", elem_id="keep")
    sampling: dict[str, Any] = {}
    with gr.Row():
        for name, option in OPTIONS.items():
            least, most, step = option.slider
            words = {"label": option.label, "info": option.help.capitalize(), "elem_id": name}
            if name == "top_k":
                sampling[name] = gr.Number(defaults[name] or 0, precision=0, minimum=0, maximum=pipe.vocab_size, **words)
            else:
                sampling[name] = gr.Slider(least, most, defaults[name], step=step, **words)
    sampling["negative_prompt"] = gr.Textbox(
        label="Negative prompt", info="What guidance leads away from", max_length=MAX_PROMPT,
        visible=not pipe.is_class_conditional and pipe.paradigm != "video",
    )  # fmt: skip
    return Shared(prompt, style, seed, sampling, gr.Textbox(visible=False)), keep


def build_methods(pipe: VisualPipeline, elem_id: str, chosen: str = "", **options: Any) -> gr.Dropdown:
    """Lay out the methods that a pipeline runs: by their speed, then by name; settings may follow, as in `gumbel:window=8`."""
    infos = {each.name: each for each in pipe.list_methods() if each.unsupported_reason is None}
    speeds: dict[str, str] = {}
    for name, (word, _) in SPEEDS.items():
        if name in infos:
            speeds.setdefault(word, name)
    choices = [(f"{word}: {SPEEDS[name][1]} ({name})", name) for word, name in speeds.items()]
    others = (each for each in infos.values() if each.name not in speeds.values() and not PRESETS[each.name].experimental)
    choices += [(f"{each.name}: {each.kind}, {each.summary}", each.name) for each in others]
    names = list(speeds.values()) or list(infos)
    value: Any = names if options.get("multiselect") else chosen if chosen in names else names[0]
    return gr.Dropdown(choices, value=value, allow_custom_value=True, label="Method", elem_id=elem_id, **options)


def select_method(pipe: VisualPipeline, component: gr.Dropdown, name: str) -> Updates:
    """Return the update that chooses a method; ValueError for one that the model has not."""
    pipe.validate_method(name)
    return {component: name}


def plain_name(method: str) -> str:
    """Return a method as a visitor knows it, with its name: "Fast (gumbel)"."""
    return f"{SPEEDS[method][0]} ({method})" if method in SPEEDS else method
