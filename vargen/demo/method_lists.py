"""Lists of the core methods to choose from, each with its sentence; links select experimental ones, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vargen.decoding import PRESETS
from vargen.pipelines.base import MethodInfo


@dataclass(frozen=True)
class MethodList:
    """A list of methods, of which the core ones are shown."""

    choice: gr.Radio | gr.CheckboxGroup | gr.Dropdown
    methods: Sequence[MethodInfo]

    def choices(self, experimental: bool) -> list[tuple[str, str]]:
        """Return label and name of each method."""
        shown = [each for each in self.methods if experimental or not PRESETS[each.name].experimental]
        return [(describe_method(each), each.name) for each in shown]

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
    component: type[Any], methods: Sequence[MethodInfo], selected: str | list[str], label: str, **options: Any
) -> MethodList:
    """Lay out a list of methods.

    Args:
        component: such as `gr.Radio`, or `gr.CheckboxGroup` where `selected` is a list.
    """
    core = [(describe_method(each), each.name) for each in methods if not PRESETS[each.name].experimental]
    return MethodList(component(core, value=selected, label=label, **options), methods)
