"""`python -m recipes NAME` trains a network of a packaged model; `package NAME` makes its folder; others evaluate results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes import first_sight, looks, runner
from vargen.cli.console import Commands, configure_logging, print_json, quiet_libraries, table
from vargen.cli.options import Device
from vargen.device import set_passive_openmp_wait

app = typer.Typer(
    name="recipes",
    cls=Commands,
    help="How the packaged models were made. The name of a recipe trains its network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root() -> None:
    configure_logging()
    quiet_libraries()


@app.command("list")
def list_recipes() -> None:
    """List the recipes, with their inputs."""
    print(table(("recipe", "inputs", "description"), runner.summaries(), "<<<"))


def _add_recipe(name: str, inputs: str, summary: str) -> None:
    @app.command(name, help=f"{summary} Inputs: {inputs}." if inputs else summary)
    def run(
        steps: Annotated[int | None, typer.Option(metavar="N", help="Length of the run, instead of the recipe's.")] = None,
        output: Annotated[
            Path | None,
            typer.Option(
                metavar="DIR", help="Log, curves, checkpoint, network. An existing run is resumed. Default: runs/NAME."
            ),
        ] = None,
        input: Annotated[
            list[str] | None,
            typer.Option(metavar="KEY=DIR", help="Repeatable. Default: the output of another recipe."),
        ] = None,
        set: Annotated[
            list[str] | None,
            typer.Option(metavar="KEY=VALUE", help="Repeatable: a setting, such as schedule.learning_rate=1e-3."),
        ] = None,
        config: Annotated[str | None, typer.Option(metavar="FILE", help="Settings in TOML, instead of the recipe's.")] = None,
        device: Annotated[Device, typer.Option(help="auto uses a GPU if there is one.")] = Device.auto,
        threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")] = None,
    ) -> None:
        folders = {key: Path(folder) for key, folder in runner.parse_pairs("--input", input or ()).items()}
        settings = runner.parse_settings(set or ())
        print_json(runner.run_recipe(name, config, steps, output, folders, settings, device, threads))


for _name, _inputs, _summary in runner.summaries():
    _add_recipe(_name, _inputs.replace(" ", ", "), _summary)


@app.command("package")
def package_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(runner.PACKAGES)}.")],
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=DIR", help="Repeatable: a finished run. Default: runs/NAME of its recipe."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: the packaged model, which is overwritten.")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Repeatable: a default of the model's calls, such as guidance_scale=2."),
    ] = None,
    recall: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of `python -m recipes recall`, for the card of emoji.")
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="How it was trained, for the model card.")] = "",
) -> None:
    """Make a packaged model from finished runs, with a model card that reports their metrics."""
    runs = {key: Path(folder) for key, folder in runner.parse_pairs("--run", run or ()).items()}
    print_json(runner.package_model(name, runs, output, runner.parse_settings(set or ()), note, recall))


app.command("recall")(looks.recall)
app.command("sheet")(looks.sheet)
app.command("first-sight")(first_sight.first_sight)
app.command("lookup-examples")(looks.lookup_examples)

if __name__ == "__main__":
    set_passive_openmp_wait()
    app(prog_name="python -m recipes")
