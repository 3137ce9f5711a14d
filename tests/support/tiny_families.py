"""A tiny pipeline of each registered family and condition, and one way to call them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    class_pipeline,
    class_var_pipeline,
    infinity_pipeline,
    text_pipeline,
    text_var_pipeline,
    tiny_transformer,
)
from tiny_video_folder import video_folder

from vargen import open_pipeline
from vargen.decoding import Accelerator, Jacobi, PooledRule, ScaleSchedule, Stage
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler

MULO = Accelerator("mulo", Jacobi(8, "from-verdict", "low-res"), PooledRule(4, 0.2, 1))  # of a grid as small as this
THERE_AND_BACK = ScaleSchedule("there and back", (Stage(until=1), Stage(until=3, model="draft"), Stage()))


def brightness(images: Any, prompts: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def drafting_pipeline() -> Any:
    """A next-token pipeline with every component that drafts."""
    pipe = text_pipeline()
    pipe.register_modules(
        draft_transformer=tiny_transformer("text", n_layer=1),
        low_res=tiny_transformer("text", grid_size=2, n_layer=1),
        eagle=EagleDrafter(dim=32, n_head=2, vocab_size=64, grid_size=4, multiple_of=32).eval(),
        medusa=MedusaDrafter(dim=32, vocab_size=64, grid_size=4, blocks=1).eval(),
        upsampler=TokenUpsampler(64, low_grid=2, grid_size=4, dim=16, blocks=1).eval(),
    )
    return pipe


@dataclass(frozen=True)
class Tiny:
    """One kind of pipeline.

    Attributes:
        pipeline: name of the pipeline class.
        build: makes a new pipeline, in an empty folder if it needs one.
        methods: methods and the options that each needs; all generate the same for a row alone and in a batch. The first is
            the baseline.
        conditions: three conditions.
        argument: argument of a call that takes them.
        options: options of every call.
        side: width and height of its images in pixels.
    """

    pipeline: str
    build: Callable[[Path], Any]
    methods: dict[Any, dict[str, Any]]
    conditions: Sequence[Any] = ("a red apple", "a very long sentence about a cat that sits", "b")
    argument: str = "prompt"
    options: dict[str, Any] = field(default_factory=dict)
    side: int = 8

    def open(self, folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        pipe = self.build(folder)
        return pipe

    def call(self, pipe: Any, rows: int | slice = 0, generator: Any = 0, method: Any = None, **options: Any) -> Any:
        """Generate for the conditions `rows` with a generator or a seed, by default as `"pt"` and with the baseline."""
        method = next(iter(self.methods)) if method is None else method
        generator = seeded(generator)[0] if isinstance(generator, int) else generator
        given = {"accelerator": method, "output_type": "pt", **self.options, **self.methods.get(method, {}), **options}
        return pipe(**{self.argument: self.conditions[rows], "generator": generator, **given})


@contextmanager
def no_passes(pipe: Any) -> Iterator[None]:
    """Fail where a network of a pipeline runs that is no text encoder."""
    hooks = [
        part.register_forward_pre_hook(lambda *_: pytest.fail("a network ran"))
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module) and name != "text_encoder"
    ]
    yield
    for hook in hooks:
        hook.remove()


def made(result: Any) -> Any:
    """The images or videos of a result."""
    return result.frames if hasattr(result, "frames") else result.images


def seeds_of(result: Any) -> list[int]:
    stats = result.stats if isinstance(result.stats, list) else [result.stats]
    return [seed for each in stats for seed in (each.seeds if hasattr(each, "seeds") else [each.seed])]


CLASSES: dict[str, Any] = {"conditions": [1, 2, 3], "argument": "class_labels"}
TOKENS: dict[Any, dict[str, Any]] = {"ar": {}, "gumbel": {}}
DRAFTS: dict[Any, dict[str, Any]] = {"ar": {}, "sjd": {}, "speculative": {}, "eagle": {}, "medusa": {}, MULO: {}}
SCALES: dict[Any, dict[str, Any]] = {"plain": {}, "code": {}, "economy": {}, THERE_AND_BACK: {}}
VIDEO: dict[Any, dict[str, Any]] = {"target": {}, "sdvg": {"scorer": brightness, "tau": 0.5}, "stride": {}}

TINY = {
    "next-token class": Tiny("LlamaGenPipeline", lambda _: class_pipeline(), TOKENS, **CLASSES),
    "next-token text": Tiny("LlamaGenPipeline", lambda _: text_pipeline(), TOKENS),
    "next-token drafters": Tiny("LlamaGenPipeline", lambda _: drafting_pipeline(), DRAFTS),
    "next-scale class": Tiny("VARPipeline", lambda _: class_var_pipeline(), SCALES, **CLASSES),
    "next-scale text": Tiny("VARPipeline", lambda _: text_var_pipeline(), SCALES),
    "next-scale bits": Tiny("InfinityPipeline", lambda _: infinity_pipeline(), SCALES, side=12),
    "video": Tiny("CausalVideoPipeline", lambda f: open_pipeline(video_folder(f)), VIDEO, options={"num_blocks": 2}, side=16),
}
