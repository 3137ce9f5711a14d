"""What threshold, neighbours, radius and window do to `mulo`: tokens per pass, relaxation and quality, each varied by itself.

    python benchmarks/mulo.py [--num 320] [--model emoji] [--output runs/mulo] [--json FILE] [--markdown FILE] [--plot FILE]

Beside them `mulo-exact` and `scd` as they are, `mulo` and `mulo-exact` with a refreshed small picture, and `wavefront` at some
reaches. `mulo` judges a draft anew in every pass, behind what was repaired since; `wavefront` from a low resolution does not
judge one again that was drawn with its surroundings settled, whatever changes before it.

Draws and scores by `vargen eval`, which goes on where it was stopped. Scores are differences to `ar` for the same prompts;
Frechet distances, of the scorer's features, need more than 288 pictures.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

START = {"threshold": 0.3, "size": 100, "radius": 2, "window": 32}  # those of the preset
SWEEPS: dict[str, list[Any]] = {
    "threshold": [0.15, 0.3, 0.5, 0.8], "size": [0, 10, 30, 100], "radius": [0, 1, 2, 3], "window": [16, 32, 64],
}  # fmt: skip
OTHERS = [
    "scd", "mulo-exact", "mulo-exact:initial=low-res-refreshed", "mulo:initial=low-res-refreshed",
    "wavefront:reach=2", "wavefront", "wavefront:reach=8", "wavefront:initial=low-res",
]  # fmt: skip


def method(name: str, value: Any) -> str:
    settings = START | {name: value}
    return "mulo:" + ",".join(f"{key}={each}" for key, each in settings.items())


def point(found: dict[str, Any]) -> dict[str, Any]:
    (score,) = found["scores"].values()
    difference = score.get("difference_to_baseline") or {"mean": 0.0, "ci95_half_width": 0.0}
    return {
        "tokens_per_pass": found["speed"]["tokens_per_pass"],
        "relaxation": found["speed"]["relaxation"],
        "score": difference["mean"],
        "half_interval": difference["ci95_half_width"],
        "frechet": (found.get("similarity") or {}).get("frechet"),  # of the pictures of `ar`
    }


def draw(report: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(SWEEPS), figsize=(4.2 * len(SWEEPS), 4.8), layout="constrained", sharey=True)
    for axis, (name, points) in zip(axes, report["sweeps"].items(), strict=True):
        xs = [point["tokens_per_pass"] for point in points.values()]
        ys = [point["score"] for point in points.values()]
        axis.errorbar(xs, ys, [point["half_interval"] for point in points.values()], marker="o", label="mulo")
        for value, x, y in zip(points, xs, ys, strict=True):
            axis.annotate(str(value), (x, y), textcoords="offset points", xytext=(4, 6), fontsize="small")
        for other, found in report["others"].items():
            axis.plot([found["tokens_per_pass"]], [found["score"]], "x", label=other)
        axis.axhline(0, color="grey", linestyle=":")
        axis.set(xlabel="tokens per pass", title=name)
    axes[0].set(ylabel="score less that of ar")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=150)


def table(report: dict[str, Any]) -> str:
    lines = ["| method | tokens per pass | relaxation | score less that of `ar` | Frechet |", "|---|---|---|---|---|"]
    rows = [(f"`{name}`", found) for name, found in report["others"].items()]
    rows += [(f"`mulo`, {name} {value}", each) for name, points in report["sweeps"].items() for value, each in points.items()]
    for name, each in rows:
        frechet = "-" if each["frechet"] is None else f"{each['frechet']:.3f}"
        score = f"{each['score']:+.2f} ± {each['half_interval']:.2f}"
        lines.append(f"| {name} | {each['tokens_per_pass']:.2f} | {each['relaxation']:.1f} | {score} | {frechet} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=320, help="pictures a point")
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--output", type=Path, default=Path("runs/mulo"), help="of vargen eval")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--markdown", type=Path, help="write the table")
    parser.add_argument("--plot", type=Path, help="draw them")
    given = parser.parse_args()
    names = dict.fromkeys(["ar", *OTHERS, *(method(name, value) for name, values in SWEEPS.items() for value in values)])
    command = ["vargen", "eval", "-o", str(given.output), "--model", given.model, "--num-images", str(given.num)]
    command += ["--scorers", "emoji-scorer", "--extractor", "emoji-scorer"]  # also for a folder's model
    subprocess.run([*command, "--threads", "1", "--methods", ",".join(names)], check=True, stdout=subprocess.DEVNULL)
    found = {each["name"]: each for each in json.loads((given.output / "metrics.json").read_text())["methods"]}
    report: dict[str, Any] = {
        "others": {name: point(found[name]) for name in OTHERS},
        "sweeps": {
            name: {str(value): point(found[method(name, value)]) for value in values} for name, values in SWEEPS.items()
        },
    }
    print(table(report))
    if given.markdown is not None:
        given.markdown.write_text(table(report) + "\n")
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    if given.plot is not None:
        draw(report, given.plot)


if __name__ == "__main__":
    main()
