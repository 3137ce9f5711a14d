"""`vargen train recall` and `sheet`: do drawn pictures show what was asked for?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.console import print_json, quiet_libraries
from vargen.cli.options import check_range
from vargen.cli.train_options import Data, Threads, app, open_data, saved
from vargen.device import fix_threads
from vargen.files import expanded

_MODEL = typer.Option(metavar="NAME|DIR", help="A packaged model or a folder.")
_TRANSFORMER = typer.Option(metavar="DIR", help="In the place of the model's own: a generator's run, or a saved transformer.")
_GUIDANCE = typer.Option(metavar="S", help="Guidance scale. Default: the model's.")
_TEMPERATURE = typer.Option(metavar="T", help="Default: the model's.")


@app.command()
def recall(
    model: Annotated[str, _MODEL] = "emoji",
    transformer: Annotated[Path | None, _TRANSFORMER] = None,
    num: Annotated[int | None, typer.Option(metavar="N", help="Draw about so many pictures. Default: 448.")] = None,
    guidance: Annotated[float | None, _GUIDANCE] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first picture.")] = 0,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Draw captions of the data and let the packaged scorer look for each among 1,000; print how often it finds them."""
    quiet_libraries()
    from recipes.emoji.evaluation import Recall, pipeline_draw
    from vargen.scoring.packaged import PackagedScorer
    from vargen.training.focus import Focus

    check_range(num, "num", 1)
    pipe = _opened(model, transformer)
    settings = _settings(guidance, temperature)
    judge = Recall(open_data(data), Focus(), PackagedScorer())
    fix_threads(threads)
    figures = judge(pipeline_draw(pipe, **settings), num, seed)
    print_json({"model": str(transformer or model), **settings, **figures})


@app.command()
def sheet(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The PNG. Its key lies beside it, as JSON.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Repeatable. Default: the packaged sheet.txt and everyday.txt.")
    ] = None,
    model: Annotated[str, _MODEL] = "emoji",
    transformer: Annotated[Path | None, _TRANSFORMER] = None,
    guidance: Annotated[float | None, _GUIDANCE] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first picture.")] = 0,
    threads: Threads = None,
) -> None:
    """Draw prompts for a viewer who has to name them: numbers in the place of prompts, in another order."""
    quiet_libraries()
    import vargen.assets
    from recipes.emoji.evaluation import pipeline_draw
    from vargen.cli.subjects import read_prompts
    from vargen.evaluation.sheet import blind_sheet

    target = expanded(output, "output")
    packaged = Path(vargen.assets.__file__).parent
    files = [expanded(file, "prompts") for file in prompts or (packaged / "sheet.txt", packaged / "everyday.txt")]
    texts = [text for file in files for text in read_prompts(file)]
    pipe = _opened(model, transformer)
    fix_threads(threads)
    key = blind_sheet(texts, pipeline_draw(pipe, **_settings(guidance, temperature)), target, seed)
    print_json({"sheet": str(target), "key": str(key), "pictures": len(texts)})


def _opened(model: str, transformer: Path | None) -> Any:
    from recipes.emoji.evaluation import open_pipeline

    place = saved(expanded(transformer, "transformer"), "transformer", "transformer") if transformer else None
    return open_pipeline(model, place)


def _settings(guidance: float | None, temperature: float | None) -> dict[str, float]:
    given = {"guidance_scale": guidance, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}
