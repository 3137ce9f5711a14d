"""Copies of a run's images under the names and in the folders that published benchmarks read; their judges stay theirs.

- GenEval (Ghosh et al. 2023): `00000/samples/0000.png`, ..., and `00000/metadata.jsonl`, the line of the prompt in the
  benchmark's `evaluation_metadata.jsonl`.
- T2I-CompBench (Huang et al. 2023): `samples/PROMPT_000000.png`, numbered over all images.
- DPG-Bench (Hu et al. 2024): `ITEM.png`, up to four images of a prompt in a square, where ITEM is the name of the prompt's
  text file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vargen.eval.run import read_image
from vargen.eval.run_directory import RunDirectory, to_file_name
from vargen.files import atomic_file

Samples = Sequence[Path]  # the images of a prompt, in the order of their seeds
_MAX_NAME = 200  # characters of a file name that are a prompt's


def export_run(run: RunDirectory, layout: str) -> list[Path]:
    """Write the images of a run for a benchmark to `LAYOUT/METHOD` in the run directory; returns these folders.

    Image k of prompt p is the one with index p + k * P, of P prompts.

    Args:
        layout: one of `LAYOUTS`.

    Raises:
        ValueError: images are missing, or see `validate_export`.
    """
    settings = run.settings()
    prompts, num, methods = settings["subjects"], settings["num"], settings["methods"]
    records = settings.get("prompt_records") or [{}] * len(prompts)
    validate_export(layout, prompts, records, num)
    complete = run.complete_records()
    if missing := sum((method, index) not in complete for method in methods for index in range(num)):
        raise ValueError(f"export {layout} needs all images, and {missing} are missing: run the same command again first")
    found = []
    for method in methods:
        folder = run.path / layout / to_file_name(method)
        for number, (prompt, record) in enumerate(zip(prompts, records, strict=True)):
            samples = [run.path / run.image(method, index) for index in range(number, num, len(prompts))]
            LAYOUTS[layout](folder, number, prompt, record, samples)
        found.append(folder)
    return found


def validate_export(layout: str, prompts: Sequence[Any], records: Sequence[Mapping[str, Any]] | None, num: int) -> None:
    """Raise ValueError if a run of `num` images of these prompts, and what their file says of them, do not fit a benchmark."""
    records = records or [{}] * len(prompts)
    if any(not isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"export {layout} is for images of prompts, and these are of classes")
    if num % len(prompts):
        raise ValueError(f"export {layout} needs equally many images of each of {len(prompts)} prompts, got num_images {num}")
    items = [record.get("item") for record in records]
    if layout == "geneval" and not all("tag" in record for record in records):
        raise ValueError("export geneval needs --prompt-file evaluation_metadata.jsonl, whose lines say what to detect")
    if layout == "dpg-bench" and not all(isinstance(item, str) and item and Path(item).name == item for item in items):
        raise ValueError("export dpg-bench needs --prompt-file DIR, the folder of the benchmark's prompts, a .txt file each")
    if layout == "dpg-bench" and num > 4 * len(prompts):
        raise ValueError(f"export dpg-bench takes at most 4 images of each prompt, got {num // len(prompts)}")
    for prompt in prompts if layout == "t2i-compbench" else ():
        if "_" in prompt or "/" in prompt or len(prompt.encode()) > _MAX_NAME:
            allowed = f"without _ and /, at most {_MAX_NAME} bytes long"
            raise ValueError(f"export t2i-compbench needs prompts that can be file names: {allowed}; got {prompt[:80]!r}")


def _write_geneval(folder: Path, number: int, prompt: str, record: Mapping[str, Any], samples: Samples) -> None:
    place = folder / f"{number:05d}"
    for sample, file in enumerate(samples):
        _copy(file, place / "samples" / f"{sample:04d}.png")
    with atomic_file(place / "metadata.jsonl") as temporary:
        temporary.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_t2i_compbench(folder: Path, number: int, prompt: str, record: Mapping[str, Any], samples: Samples) -> None:
    for sample, file in enumerate(samples):
        _copy(file, folder / "samples" / f"{prompt}_{number * len(samples) + sample:06d}.png")


def _write_dpg_bench(folder: Path, number: int, prompt: str, record: Mapping[str, Any], samples: Samples) -> None:
    images = [read_image(file) for file in samples]
    width, height = images[0].size
    square = Image.new("RGB", (width * min(2, len(images)), height * (1 + (len(images) > 2))))
    for place, image in enumerate(images):
        square.paste(image, (place % 2 * width, place // 2 * height))
    with atomic_file(folder / f"{record['item']}.png") as temporary:
        square.save(temporary, format="PNG")


def _copy(source: Path, target: Path) -> None:
    with atomic_file(target) as temporary:
        shutil.copyfile(source, temporary)


LAYOUTS: dict[str, Callable[[Path, int, str, Mapping[str, Any], Samples], None]] = {
    "geneval": _write_geneval,
    "t2i-compbench": _write_t2i_compbench,
    "dpg-bench": _write_dpg_bench,
}
