"""Quality and passes against the relaxation that is spent: relaxed rules on the same drafts at equal budgets.

    python benchmarks/relaxation.py [--num 96] [--budgets 2,4,8] [--output runs/relaxation] [--json FILE] [--plot FILE]

One step of any relaxed rule is as far from the target, in total variation, as the acceptance that it grants beyond p/q; so
rules are compared at equal budgets of that, on the drafts of `scd`. Each is set so loosely that it spends the budgets. Draws
and scores by `vargen eval`, which goes on where it was stopped. Scores are differences to `ar` for the same prompts, with 95 %
intervals.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Looser than one would draw with: the budget is to be what limits them.
RULES = {
    "ratio": "ratio=8",
    "ratio, tightening": "ratio=8,tightening=0.7",
    "neighborhood": "size=1000,ratio=none,delta=0.5",
    "neighborhood, by ratio": "size=1000,ratio=8",
    "grouped": "size=50,delta=1",
    "typical": "epsilon=0.09,alpha=0.3",
}


def method(rule: str, budget: float) -> str:
    return f"scd:acceptance={rule.split(',')[0]},{RULES[rule]},budget={budget:g}"


def evaluated(output: Path, budgets: list[float], num: int) -> dict[str, dict[str, Any]]:
    """What `vargen eval` says of every method, by its name."""
    methods = ["ar", "scd", *(method(rule, budget) for rule in RULES for budget in budgets)]
    command = ["vargen", "eval", "-o", str(output), "--num-images", str(num), "--batch-size", "1", "--threads", "1"]
    subprocess.run([*command, "--methods", ",".join(methods)], check=True, stdout=subprocess.DEVNULL)
    report = json.loads((output / "metrics.json").read_text())
    return {found["name"]: found for found in report["methods"]}


def point(found: dict[str, Any]) -> dict[str, float]:
    """Relaxation of a picture, tokens per pass, and the score less that of `ar` with half its interval."""
    (score,) = found["scores"].values()
    difference = score.get("difference_to_baseline") or {"mean": 0.0, "ci95_half_width": 0.0}
    return {
        "relaxation": found["speed"]["relaxation"],
        "tokens_per_pass": found["speed"]["tokens_per_pass"],
        "score": difference["mean"],
        "half_interval": difference["ci95_half_width"],
        "pictures": found["num_images"],
    }


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (quality, passes) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    exact = report["exact"]
    for number, (rule, points) in enumerate(report["rules"].items()):
        spent = [each["relaxation"] for each in points]
        shift = [x + 0.04 * max(spent) * (number - len(report["rules"]) / 2) / 3 for x in spent]  # so that bars do not overlap
        quality.errorbar(shift, [p["score"] for p in points], [p["half_interval"] for p in points], marker="o", label=rule)
        passes.plot([exact["relaxation"], *spent], [exact["tokens_per_pass"], *(p["tokens_per_pass"] for p in points)], "o-")
    quality.axhline(exact["score"], color="grey", linestyle=":", label="scd, exact")
    quality.set(xlabel="relaxation a picture", ylabel="score less that of ar")
    passes.set(xlabel="relaxation a picture", ylabel="tokens per pass")
    quality.legend(fontsize="small")
    figure.suptitle(f"{exact['pictures']} pictures a point; bars are 95 % intervals")
    figure.savefig(path, dpi=150)


def table(report: dict[str, Any]) -> str:
    lines = ["| rule | budget | spent | tokens per pass | score less that of `ar` |", "|---|---|---|---|---|"]
    rows = [("`scd`, exact", 0, report["exact"])]
    rows += [(rule, budget, p) for rule, ps in report["rules"].items() for budget, p in zip(report["budgets"], ps, strict=True)]
    for name, budget, p in rows:
        score = f"{p['score']:+.3f} ± {p['half_interval']:.3f}"
        lines.append(f"| {name} | {budget:g} | {p['relaxation']:.2f} | {p['tokens_per_pass']:.2f} | {score} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=96, help="pictures a point")
    parser.add_argument("--budgets", default="2,4,8", help="of a picture")
    parser.add_argument("--output", type=Path, default=Path("runs/relaxation"), help="of vargen eval")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--plot", type=Path, help="draw them")
    given = parser.parse_args()
    budgets = [float(part) for part in given.budgets.split(",")]
    if given.num < 2 or min(budgets) <= 0:
        sys.exit("num must be at least 2, and budgets above 0")
    found = evaluated(given.output, budgets, given.num)
    report = {
        "budgets": budgets,
        "settings": RULES,
        "exact": point(found["scd"]),
        "rules": {rule: [point(found[method(rule, budget)]) for budget in budgets] for rule in RULES},
    }
    print(table(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1))
    if given.plot is not None:
        draw(report, given.plot)


if __name__ == "__main__":
    main()
