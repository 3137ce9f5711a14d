"""The page: prompt and buttons on top, one tab per mode below them, and a wall of examples."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr

from vargen.demo import opening
from vargen.demo.calls import user_errors
from vargen.demo.edit_tab import OwnEvent, build_edit_tab
from vargen.demo.image_tab import build_comparison, build_image_tab
from vargen.demo.inputs import ANY_STYLE, Mode, Shared, Updates, Values, build_shared, new_seed
from vargen.demo.known import KnownPrompts
from vargen.demo.links import MAX_PROMPT, read_link
from vargen.demo.malformed_requests import Page
from vargen.demo.race_tab import build_race_tab
from vargen.demo.video_tab import build_video_tab
from vargen.pipelines.base import VisualPipeline
from vargen.scoring.protocol import Scorer

TITLE = "vargen: the same image, faster"
_MAX_QUEUE = 32
_INSTANT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
# Of events that start a run: gradio follows changes of a state only in its queue.
_QUEUED: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}
# Browsers keep a page that was left, with its streams, and have six connections to a server; but no page that handles "unload".
_LEAVE = "() => { addEventListener('unload', () => {}); }"
_WAITING = "Waiting for a free place …"
# As a click: the image editor of a tab that gradio itself selects hangs with the next image.
_PRESS_TAB = "(mode) => { document.querySelector(`button[role=tab][data-tab-id=${mode}]`)?.click(); }"
_SHOW_LINK = "(link) => { if (link) history.replaceState(null, '', link); }"


@dataclass(frozen=True)
class Models:
    """The pipelines of a page, on their devices.

    Attributes:
        name: of the main model, as visitors see it; no path.
        image: of images; None on the page of a video model alone. edit: of a next-scale model that starts from images.
        video: of videos. image_pipe: generates the images that its videos start from.
        scorer: scores how well an image matches its prompt, and drafts of videos.
        has_examples: whether the page opens on recorded examples, which are those of the packaged models.
    """

    name: str
    image: VisualPipeline | None = None
    edit: VisualPipeline | None = None
    video: Any = None
    image_pipe: VisualPipeline | None = None
    scorer: Scorer | None = None
    has_examples: bool = False


@dataclass(frozen=True)
class Session:
    """What belongs to one visitor.

    Attributes:
        opened: name of the open mode. pinned: whether the next run takes the seed as it is, as one from a link.
        order: a number; a run starts when it changes.
    """

    opened: gr.State
    pinned: gr.State
    order: gr.State


@dataclass(frozen=True)
class Buttons:
    """The button that starts a run, in whose place the other one stops it."""

    start: gr.Button
    stop: gr.Button


def build_page(models: Models, concurrency: int = 1) -> gr.Blocks:
    """Build the page. `concurrency`: number of calls at a time, over all visitors."""
    main = models.image or models.video
    known = KnownPrompts(main)
    tabs: dict[str, gr.Tab] = {}
    modes: dict[str, Mode] = {}
    own: list[OwnEvent] = []
    with Page(title=TITLE, analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        about = f"Fast image and video generation. Model: **{html.escape(models.name)}**.\n\n{known.describe()}"
        gr.Markdown(f"# vargen\n{about}", elem_id="head")
        session = Session(gr.State("image" if models.image else "video"), gr.State(False), gr.State(0))
        prompt, buttons, style, count = _build_top(main, known)
        _build_suggestions(known, prompt, session)
        with gr.Accordion("Seed and sampling", open=False, elem_id="advanced"):
            shared, keep = build_shared(main, prompt, style)
        with gr.Tabs(elem_id="modes"):
            if models.image is not None:
                with gr.Tab("Image", id="image") as tabs["image"]:
                    race = opening.render_race() if models.has_examples else ""
                    modes["image"] = build_image_tab(models.image, shared, count, models.scorer, race)
            if models.edit is not None:
                with gr.Tab("Edit", id="edit") as tabs["edit"]:
                    modes["edit"], own = build_edit_tab(models.edit, shared)
            if models.video is not None:
                with gr.Tab("Video", id="video") as tabs["video"]:
                    modes["video"] = build_video_tab(models.video, shared, models.scorer, models.image_pipe)
            if models.image is not None:
                with gr.Tab("Race", id="race") as tabs["race"]:
                    modes["race"] = build_race_tab(models.image, shared)
        for name, tab in tabs.items():
            opened = [session.opened, buttons.start, count]
            selected = tab.select(partial(_open_mode, name, modes[name]), None, opened, **_INSTANT)
            if (on_open := modes[name].on_open) is not None:
                own.append((selected.then, on_open, set()))
        _connect_runs(shared, keep, buttons, modes, session, own, concurrency)
        _connect_link(page, shared, modes, session)
        if models.has_examples:
            _build_wall(shared, modes, session)
        if models.image is not None:
            build_comparison(models.image)
        page.load(None, js=_LEAVE, api_visibility="private")
    return page.queue(max_size=_MAX_QUEUE, default_concurrency_limit=concurrency)


def _connect_runs(
    shared: Shared,
    keep: gr.Checkbox,
    buttons: Buttons,
    modes: dict[str, Mode],
    session: Session,
    own: list[OwnEvent],
    concurrency: int,
) -> None:
    """Connect what starts and stops a run of the open mode, and the events of modes that run by themselves."""
    notes = [mode.note for mode in modes.values()]
    inputs = {shared.prompt, shared.style, shared.seed, *shared.sampling.values(), session.opened}
    inputs |= {each for mode in modes.values() for each in mode.inputs}
    outputs = [shared.link, *(each for mode in modes.values() for each in mode.outputs)]
    both: list[Any] = [buttons.start, buttons.stop]
    queue: dict[str, Any] = {"concurrency_id": "generate", "concurrency_limit": concurrency, "show_progress": "hidden"}

    def set_running(seed: int, kept: bool, pinned: bool) -> list[Any]:
        chosen = seed if kept or pinned else new_seed()
        return [gr.Button(visible=False), gr.Button(visible=True), chosen, False, *(_WAITING for _ in notes)]

    def set_idle() -> list[Any]:
        return [gr.Button(visible=True), gr.Button(visible=False)]

    def say_stopped() -> list[Any]:
        return [*set_idle(), *("Stopped." for _ in notes)]

    def run_open_mode(values: Values) -> Iterator[Updates]:
        with user_errors():
            yield from modes[values[session.opened]].run(values)

    pressed = gr.on(
        [buttons.start.click, shared.prompt.submit, session.order.change],
        set_running,
        [shared.seed, keep, session.pinned],
        [*both, shared.seed, session.pinned, *notes],
        **_INSTANT,
    )
    running = pressed.then(run_open_mode, inputs, outputs, api_visibility="private", **queue)
    running.then(set_idle, None, both, **_INSTANT)
    running.success(None, shared.link, None, js=_SHOW_LINK, api_visibility="private")
    running.failure(lambda: ["Stopped." for _ in notes], None, notes, **_INSTANT)
    buttons.stop.click(say_stopped, None, [*both, *notes], cancels=[running], **_INSTANT)
    shared.seed.input(lambda: True, None, session.pinned, **_INSTANT)
    for trigger, function, read in own:

        def run_own(values: Values, function: Any = function) -> Iterator[Updates]:
            yield {notes[0]: gr.skip()}  # gradio empties all outputs of a generator that yields nothing
            if values[session.opened] == "edit":
                with user_errors():
                    yield from function(values)

        trigger(run_own, inputs | read, outputs, trigger_mode="always_last", api_visibility="private", **queue)


def _open_mode(name: str, mode: Mode) -> list[Any]:
    return [name, gr.Button(mode.verb), gr.Radio(visible=name == "image")]


def _build_top(pipe: VisualPipeline, known: KnownPrompts) -> tuple[gr.Textbox, Buttons, gr.Radio, gr.Radio]:
    """Lay out the prompt, the buttons beside it, the styles that the model knows, and the number of images."""
    example = "a hamburger" if not known.names or "hamburger" in known.names else known.names[0]
    with gr.Row(elem_id="top"):
        prompt = gr.Textbox(
            example, show_label=False, container=False, placeholder="Describe what to generate", lines=1, max_lines=4,
            scale=1, max_length=MAX_PROMPT, autofocus=True, elem_id="prompt",
        )  # fmt: skip
        buttons = Buttons(
            gr.Button("Generate", variant="primary", scale=0, min_width=140, elem_id="start"),
            gr.Button("Stop", variant="stop", visible=False, scale=0, min_width=140, elem_id="stop"),
        )
    styles = [ANY_STYLE, *(pipe.config.get("prompt_styles") or ())]
    chips: dict[str, Any] = {"show_label": False, "container": False, "elem_classes": "chips"}
    with gr.Row(elem_id="options"):
        style = gr.Radio(
            [(f"{each} style", each) for each in styles], value=ANY_STYLE, visible=len(styles) > 1, elem_id="style", **chips
        )
        count = gr.Radio([("One image", 1), ("Four", 4)], value=1, visible=pipe.fps is None, elem_id="count", **chips)
    return prompt, buttons, style, count


def _build_suggestions(known: KnownPrompts, prompt: gr.Textbox, session: Session) -> None:
    """Offer near prompts when the prompt is far from what the model knows."""
    far = gr.Markdown(visible=False, elem_id="far")
    near = gr.Dataset(components=[prompt], samples=[[""]], visible=False, show_label=False, samples_per_page=8, elem_id="near")

    def suggest(typed: str) -> list[Any]:
        found, unread = known.near(typed), known.unread(typed)
        message = unread or f"The model does not know “{html.escape(typed)}”. It knows:"
        shown = bool(found or unread)
        return [
            gr.Markdown(message, visible=shown),
            gr.Dataset(samples=[[each] for each in found] or [[""]], visible=bool(found)),
        ]

    def take(sample: list[str], order: int) -> list[Any]:
        return [sample[0], gr.Markdown(visible=False), gr.Dataset(visible=False), order + 1]

    prompt.change(suggest, prompt, [far, near], trigger_mode="always_last", **_INSTANT)
    near.click(take, [near, session.order], [prompt, far, near, session.order], **_QUEUED)


def _connect_link(page: gr.Blocks, shared: Shared, modes: dict[str, Mode], session: Session) -> None:
    """Have a loaded page generate what its address says."""
    tab = gr.Textbox(visible=False)
    arrived = gr.State(None)  # changes with a link only: an event that leaves a text alone may still undo what is being typed

    def read_query(request: gr.Request) -> dict[str, str] | None:
        return dict(request.query_params) if request.query_params.get("prompt") else None

    def follow(query: dict[str, str]) -> Updates:
        try:
            found = read_link(query)
            mode = found.get("mode", session.opened.value)
            if mode not in modes:
                raise ValueError(f"This page has no mode {mode!r}; it has {', '.join(modes)}.")
            chosen = modes[mode].set_method(found["method"]) if "method" in found else {}
        except (ValueError, TypeError) as error:
            gr.Warning(html.escape(str(error)))
            return {session.opened: session.opened.value}
        sampling = {component: found[name] for name, component in shared.sampling.items() if name in found}
        seed = {shared.seed: found["seed"], session.pinned: True} if "seed" in found else {}
        opened = {tab: mode, session.opened: mode, session.order: 1}
        return {shared.prompt: found["prompt"], shared.style: ANY_STYLE, **chosen, **sampling, **seed, **opened}

    chosen = [each for mode in modes.values() for each in mode.inputs]
    outputs = [shared.prompt, shared.style, shared.seed, *shared.sampling.values(), session.opened, session.pinned]
    page.load(read_query, None, arrived, **_QUEUED)
    followed = arrived.change(follow, arrived, [*outputs, session.order, tab, *chosen], **_QUEUED)
    followed.success(None, tab, None, js=_PRESS_TAB, api_visibility="private")


def _build_wall(shared: Shared, modes: dict[str, Mode], session: Session) -> None:
    """Lay out images and videos that were generated before; a click generates one again."""
    wall = opening.read_wall(tuple(modes))
    tab = gr.Textbox(visible=False)
    listed = [
        (str(opening.FOLDER / each["file"]), "▶ " * (each["mode"] == "video") + each["prompt"].partition(",")[0])
        for each in wall
    ]
    tiles = gr.Gallery(
        listed, label="Examples: click one to generate it", columns=8, height="auto", allow_preview=False,
        interactive=False, object_fit="contain", elem_id="wall", buttons=[],
    )  # fmt: skip

    def take(order: int, selected: gr.SelectData) -> list[Any]:
        tile = wall[int(selected.index)]
        opened = [tile["mode"], tile["mode"], gr.Gallery(selected_index=None), order + 1]
        return [tile["prompt"], ANY_STYLE, tile["seed"], True, *opened]

    outputs = [shared.prompt, shared.style, shared.seed, session.pinned, tab, session.opened, tiles, session.order]
    taken = tiles.select(take, session.order, outputs, **_QUEUED)
    taken.success(None, tab, None, js=_PRESS_TAB, api_visibility="private")
