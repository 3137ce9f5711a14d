"""Endpoints for programs: /generate, /compare and /methods. Their docstrings are the page's API documentation."""

from __future__ import annotations

from typing import Any

import gradio as gr

from vargen.decoding import DEFAULT
from vargen.demo.engine import Drawn, Engine
from vargen.demo.inputs import new_seed
from vargen.demo.race_tab import BASELINE, identical
from vargen.demo.runs import told_plainly
from vargen.demo.settings import MOST_LANES, Settings


def build(engine: Engine, draw_options: dict[str, Any]) -> None:
    """Register the endpoints with the page that is being built."""

    def settings(prompt: str, method: str, seed: int | None, num_images: int, given: dict[str, Any]) -> Settings:
        chosen = {**engine.defaults, **{name: value for name, value in given.items() if value is not None}}
        found = Settings(prompt, method, new_seed() if seed is None else seed, num_images=num_images, **chosen)
        engine.check(found)
        return found

    def generate(
        prompt: str,
        method: str = DEFAULT,
        seed: int | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | None = None,
        num_images: int = 1,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Draw pictures of a prompt (for a model of classes: a class's name or number).

        What is left out takes the checkpoint's default, the seed a random one; top_k 0 keeps every token. Picture k has seed
        + k. Returns the PNG files, which carry their parameters, and the parameters with the statistics of the run.
        """
        with told_plainly():
            given = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
            wanted = settings(prompt, method, seed, num_images, {**given, "negative_prompt": negative_prompt})
            drawn = engine.start(wanted, previews=False).result()
            return [_file(path) for path in engine.save(drawn)], _report(engine, drawn)

    def compare(prompt: str, methods: list[str], seed: int | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Draw one prompt with one seed by several methods, in turn.

        Returns a PNG file and a report per method; `identical` tells whether the picture is the one that `ar` drew.
        """
        with told_plainly():
            if not isinstance(methods, list) or not 2 <= len(methods) <= MOST_LANES:
                raise ValueError(f"Give a list of two to {MOST_LANES} methods.")
            seed = new_seed() if seed is None else seed
            wanted = [settings(prompt, method, seed, 1, {}) for method in methods]
            drawn = [engine.start(each, previews=False).result() for each in wanted]
            baseline = next((each for each in drawn if each.settings.method == BASELINE), None)
            same = [None if baseline is None else identical(each, baseline) for each in drawn]
            reports = [{**_report(engine, each), "identical": one} for each, one in zip(drawn, same, strict=True)]
            return [_file(path) for each in drawn for path in engine.save(each)], reports

    def methods() -> list[dict[str, Any]]:
        """The methods: name, "exact" or "relaxed", a line on each, its paper, and why this model cannot run it, if so."""
        return [vars(method) for method in engine.methods.values()]

    gr.api(generate, api_name="generate", **draw_options)
    gr.api(compare, api_name="compare", **draw_options)
    gr.api(methods, api_name="methods", queue=False)


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _report(engine: Engine, drawn: Drawn) -> dict[str, Any]:
    parameters = engine.parameters(drawn.settings, drawn)
    return {**parameters, "tokens_per_second": drawn.tokens_per_second, "stats": drawn.stats.to_dict()}
