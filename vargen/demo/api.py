"""Endpoints for programs: /generate, /compare and /methods. Their docstrings are the page's API documentation.

Those that draw are generators, because only a generator can be ended: gradio closes it, between two of its values, when the
caller cancels the job or is gone. So they give a value now and then, which tells how far the drawing is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import gradio as gr

from vargen.demo.image_service import Engine
from vargen.demo.inputs import new_seed
from vargen.demo.jobs import Drawn, Run, told_plainly
from vargen.demo.race_tab import identical
from vargen.demo.request import MOST_LANES, Settings

_LOOK_SECONDS = 0.25  # how often it is looked whether the caller is still there


def build(engine: Engine, draw_options: dict[str, Any]) -> None:
    """Register the endpoints with the page that is being built."""

    def settings(
        prompt: str, method: str, seed: int | None, given: dict[str, Any], num_images: int = 1, num_candidates: int = 1
    ) -> Settings:
        chosen = {**engine.defaults, **{name: value for name, value in given.items() if value is not None}}
        chosen |= {"num_images": num_images, "num_candidates": num_candidates}
        found = Settings(prompt, method, new_seed() if seed is None else seed, **chosen)
        engine.check(found)
        return found

    def generate(
        prompt: str,
        method: str | None = None,
        seed: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | None = None,
        num_images: int = 1,
        num_candidates: int = 1,
    ) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Draw pictures of a prompt (for a model of classes: a class's name or number).

        The method may have settings, as in gumbel:window=8. What is left out takes the model's default, the seed a random
        one; top_k 0 keeps every token. Picture k has seed + k. Of several candidates of each, the scorer keeps the best.
        Returns the PNG files, which carry their parameters, and the parameters with the statistics of the run. A caller that
        listens gets, while it draws, no files and the tokens drawn so far. A job that is cancelled, or whose caller is gone,
        is not drawn to its end.
        """
        with told_plainly():
            given: dict[str, Any] = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k}
            given |= {"top_p": top_p, "negative_prompt": negative_prompt}
            wanted = settings(prompt, method or engine.default_method, seed, given, num_images, num_candidates)
            drawn = yield from _drawn(engine.start(wanted, previews=False))
            yield [_file(path) for path in engine.save(drawn)], _report(engine, drawn)

    def compare(
        prompt: str, methods: list[str], seed: int | None = None
    ) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """Draw one prompt with one seed by several methods, in turn.

        Returns a PNG file and a report per method; `identical` tells whether the picture is the one that the baseline drew. A
        caller that listens gets, while they draw, no files and the tokens drawn so far. A job that is cancelled, or whose
        caller is gone, is not drawn to its end.
        """
        with told_plainly():
            if not isinstance(methods, list) or not 2 <= len(methods) <= MOST_LANES:
                raise ValueError(f"Give a list of two to {MOST_LANES} methods.")
            seed = new_seed() if seed is None else seed
            wanted = [settings(prompt, method, seed, {}) for method in methods]
            drawn: list[Drawn] = []
            told: list[dict[str, Any]] = []
            for each in wanted:
                run = engine.start(each, previews=False)
                drawn.append((yield from _drawn(run, told)))
                told.append(_progress(run))
            baseline = next((each for each in drawn if each.settings.method == engine.baseline), None)
            same = [None if baseline is None else identical(each, baseline) for each in drawn]
            reports = [{**_report(engine, each), "identical": one} for each, one in zip(drawn, same, strict=True)]
            yield [_file(path) for each in drawn for path in engine.save(each)], reports

    def methods() -> list[dict[str, Any]]:
        """The methods: name, "exact" or "relaxed", a line on each, its paper, and why this model cannot run it, if so."""
        return [vars(method) for method in engine.methods.values()]

    gr.api(generate, api_name="generate", **draw_options)
    gr.api(compare, api_name="compare", **draw_options)
    gr.api(methods, api_name="methods", queue=False)


def _drawn(run: Run, before: list[dict[str, Any]] | None = None) -> Generator[tuple[list[Any], Any], None, Drawn]:
    """Tell now and then how far a drawing is, after what came `before`, and return it; closed, it stops the drawing."""
    try:
        while not run.done.wait(_LOOK_SECONDS):
            yield [], _progress(run) if before is None else [*before, _progress(run)]
        return run.result()
    finally:
        run.stop.set()


def _progress(run: Run) -> dict[str, Any]:
    return {"accelerator": run.settings.method, "tokens_drawn": run.tokens, "tokens": run.total}


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _report(engine: Engine, drawn: Drawn) -> dict[str, Any]:
    parameters = engine.parameters(drawn.settings, drawn)
    return {**parameters, "tokens_per_second": drawn.tokens_per_second, "pictures": drawn.told, "stats": drawn.stats.to_dict()}
