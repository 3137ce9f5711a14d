"""The modes of the page: a tab and a start and a stop button each. Only the buttons of the open mode are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import gradio as gr

START = "vg-start"  # class of the buttons that Enter in the prompt presses


@dataclass(frozen=True)
class Mode:
    """A mode: the label of its tab and of its start button, and the ids of its buttons."""

    title: str
    verb: str
    start_id: str
    stop_id: str


MODES = {
    "image": Mode("Image", "Generate", "generate", "stop"),
    "live": Mode("Live", "Another seed", "live", "live-stop"),
    "video": Mode("Video", "Generate", "video-make", "video-stop"),
    "race": Mode("Race", "Race", "race", "race-stop"),
    "explore": Mode("Explore", "Explore", "explore", "explore-stop"),
}


@dataclass(frozen=True)
class ModeButtons:
    """The buttons of a mode; a stop button is shown while it can be pressed."""

    start: gr.Button
    stop: gr.Button


def build_mode_buttons(names: Sequence[str]) -> dict[str, ModeButtons]:
    """Lay out the buttons of some modes in one place; style.css shows those of the mode that page.js sets on the body."""
    with gr.Row(elem_id="go"):
        return {
            name: ModeButtons(
                gr.Button(
                    MODES[name].verb, variant="primary", min_width=120, elem_id=MODES[name].start_id,
                    elem_classes=[START, "vg-go", f"vg-go-{name}"],
                ),
                gr.Button(
                    "Stop", variant="stop", interactive=False, min_width=76, elem_id=MODES[name].stop_id,
                    elem_classes=["vg-stop", "vg-go", f"vg-go-{name}"],
                ),
            )
            for name in names
        }  # fmt: skip


@contextmanager
def mode_tab(name: str) -> Iterator[gr.Tab]:
    """Open the tab of a mode."""
    with gr.Tab(MODES[name].title, id=name) as tab:
        yield tab
    tab.select(None, js=f"() => {{ window.vargen.open({name!r}); }}", api_visibility="private")
