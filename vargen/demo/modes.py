"""The modes of the page: a tab and a start and a stop button each. One button is seen: start or stop of the open mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import gradio as gr

from vargen.demo.rendering import hint

START = "vg-start"  # class of the buttons that Enter in the prompt presses


@dataclass(frozen=True)
class Mode:
    """A mode: the label of its tab and of its start button, the ids of its buttons, and what it does in a sentence."""

    title: str
    verb: str
    start_id: str
    stop_id: str
    summary: str


MODES = {
    "image": Mode("Image", "Generate", "generate", "stop", "An image from a prompt, which fills in as you watch."),
    "live": Mode(
        "Live", "New image", "live", "live-stop", "Another model follows as you type. Paint over a part to change it."
    ),
    "video": Mode(
        "Video", "Generate", "video-make", "video-stop",
        "A short loop: a small model drafts its parts, and a large one redoes those that fall short.",
    ),
    "race": Mode("Race", "Race", "race", "race-stop", "Fast and slow methods side by side, on one prompt and seed."),
}  # fmt: skip


@dataclass(frozen=True)
class ModeButtons:
    """The buttons of a mode; a stop button lies over the start button while it can be pressed."""

    start: gr.Button
    stop: gr.Button


def build_mode_buttons(names: Sequence[str]) -> dict[str, ModeButtons]:
    """Lay out the buttons of some modes in one place; style.css shows those of the mode that page.js sets on the body."""
    with gr.Row(elem_id="go"):
        return {
            name: ModeButtons(
                gr.Button(
                    MODES[name].verb, variant="primary", min_width=0, elem_id=MODES[name].start_id,
                    elem_classes=[START, "vg-go", f"vg-go-{name}"],
                ),
                gr.Button(
                    "Stop", variant="stop", interactive=False, min_width=0, elem_id=MODES[name].stop_id,
                    elem_classes=["vg-stop", "vg-go", f"vg-go-{name}"],
                ),
            )
            for name in names
        }  # fmt: skip


@contextmanager
def mode_tab(name: str) -> Iterator[gr.Tab]:
    """Open the tab of a mode. What the first mode does is seen without a sentence."""
    with gr.Tab(MODES[name].title, id=name) as tab:
        if name != "image":
            gr.HTML(hint(MODES[name].summary))
        yield tab
    tab.select(None, js=f"() => {{ window.vargen.open({name!r}); }}", api_visibility="private")
