"""API endpoints: /generate, /compare and /methods. Their docstrings are the API documentation on the page.

The endpoints that generate images are generators, because gradio can only end a generator: it closes one between two yields
when the caller cancels the job or disconnects. They therefore yield progress regularly.
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

_LOOK_SECONDS = 0.25  # polling interval for a disconnected caller


def build(engine: Engine, draw_options: dict[str, Any]) -> None:
    """Register the endpoints with the page under construction."""

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
        """Generate images from a prompt (for a class-conditional model: a class name or number).

        The method may have settings, as in gumbel:window=8. Omitted arguments take the model's defaults, and the seed a random
        value; top_k 0 keeps every token. Image k has seed + k. If there are several candidates per image, the scorer selects
        the best. Returns the PNG files, which carry their parameters, and the parameters with the statistics of the run. A
        streaming caller receives, during generation, no files and the number of tokens generated so far. A job stops early if
        it is canceled or its caller disconnects.
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
        """Generate one image with the same prompt and seed by several methods, one after another.

        Returns a PNG file and a report per method; `identical` is true if the image equals the baseline's. A streaming caller
        receives, during generation, no files and the number of tokens generated so far. A job stops early if it is canceled or
        its caller disconnects.
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
        """List the methods: name, "exact" or "relaxed", a summary, the paper, and the reason if this model cannot run it."""
        return [vars(method) for method in engine.methods.values()]

    gr.api(generate, api_name="generate", **draw_options)
    gr.api(compare, api_name="compare", **draw_options)
    gr.api(methods, api_name="methods", queue=False)


def _drawn(run: Run, before: list[dict[str, Any]] | None = None) -> Generator[tuple[list[Any], Any], None, Drawn]:
    """Yield the progress of a run after the results `before` it, and return its result. Closing the generator stops the run."""
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
