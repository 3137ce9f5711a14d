"""Lists of methods to choose from: the core ones, and the experimental ones on request, each with its sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.decoding import PRESETS
from vargen.demo.jobs import INSTANT_EVENT
from vargen.pipelines.base import MethodInfo


@dataclass(frozen=True)
class MethodList:
    """A list of methods, core ones first, and the checkbox that adds the experimental ones, if there are any."""

    choice: gr.Radio | gr.CheckboxGroup | gr.Dropdown
    more: gr.Checkbox
    methods: Sequence[MethodInfo]

    def choices(self, more: bool) -> list[tuple[str, str]]:
        """Return label and name of each method; `more` includes the experimental ones."""
        return [(describe_method(each), each.name) for each in self.methods if more or not PRESETS[each.name].experimental]

    def select(self, *names: str) -> dict[Any, Any]:
        """Return the updates that select methods, if they are listed; a list of which one is chosen takes one name.

        A name with settings, such as `gumbel:window=8`, becomes a choice of its own.
        """
        chosen: Any = list(names) if isinstance(self.choice, gr.CheckboxGroup) else names[0]
        if set(names) <= {value for _, value in self.choices(False)}:
            return {self.choice: type(self.choice)(value=chosen)}
        listed = self.choices(True)
        known = {value for _, value in listed}
        if {name.partition(":")[0] for name in names} <= known:
            listed += [(name, name) for name in names if name not in known]
            return {self.choice: type(self.choice)(choices=listed, value=chosen)}
        return {}


def describe_method(method: MethodInfo) -> str:
    """Return a method's name, its kind and its sentence on one line."""
    return f"{method.name} · {method.kind} · {method.summary}"


def build_method_list(
    component: type[Any], methods: Sequence[MethodInfo], selected: str | list[str], more_id: str, label: str, **options: Any
) -> MethodList:
    """Lay out a list of methods; experimental ones are hidden until the checkbox below it is checked.

    Args:
        component: such as `gr.Radio`, or `gr.CheckboxGroup` where `selected` is a list. more_id: id of the checkbox.
    """

    def update(more: bool, chosen: Any) -> Any:
        listed = found.choices(bool(more))
        names = {name for _, name in listed}
        if isinstance(chosen, list):
            return component(choices=listed, value=[name for name in chosen if name in names])
        return component(choices=listed, value=chosen if chosen in names else selected)

    core = [(describe_method(each), each.name) for each in methods if not PRESETS[each.name].experimental]
    choice = component(core, value=selected, label=label, **options)
    count = len(methods) - len(core)
    more = gr.Checkbox(label=f"More methods ({count} experimental)", visible=count > 0, elem_id=more_id, elem_classes="vg-more")
    found = MethodList(choice, more, methods)
    more.change(update, [more, choice], choice, **INSTANT_EVENT)
    return found
