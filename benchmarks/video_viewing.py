"""What a model of video is looked at with: strips and loops to show, a sheet for a blind viewer, and whether the scorer ranks.

    OMP_NUM_THREADS=1 python benchmarks/video_viewing.py show --model emoji-video --output assets/emoji-video
    OMP_NUM_THREADS=1 python benchmarks/video_viewing.py blind --model emoji-video --output runs/blind --key runs/blind-key.tsv
    OMP_NUM_THREADS=1 python benchmarks/video_viewing.py rank --model emoji-video --output benchmarks/video_rank_NAME_DATE.json
    OMP_NUM_THREADS=1 python benchmarks/video_viewing.py gain --captions moving --image-model emoji --output runs/gain.json

`show` writes strips.png and eight looping webp files. `blind` generates the captions by the target and writes them as
01.webp to 24.webp with a sheet of strips, and pages with all frames, in shuffled order and without a caption; which is which
is in the key alone, which lies outside of the folder. `rank` counts the blocks in which the scorer puts the target's block
above the drafter's: of the drafter's own video, and of the draft behind the target's past; without a difference there is
nothing to route. `gain` is, by method, the score of each video's caption minus the mean score of the other captions.

`--captions` names a list in assets: `motion`, or `moving`, whose captions ask for motions of things; `--image-model emoji`
starts each video from an image.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import vargen.assets
from vargen.decoding import BlockView, Threshold, VideoMethod, min_score
from vargen.device import describe_machine
from vargen.files import atomic_file
from vargen.pipelines.registry import open_pipeline
from vargen.scoring.frames import FrameScorer

CELL, LABEL, GAP = 64, 150, 2
PAGE_CLIPS, PAGE_COLUMNS, PAGE_CELL = 4, 10, 112
GAIN_METHODS = ("target", "draft", "sdvg")
KNOWN = 12  # the first captions are in the words of training


def captions(name: str = "motion") -> list[tuple[str, str]]:
    """Captions of a list in assets, each with its motion."""
    lines = (Path(vargen.assets.__file__).parent / f"{name}.txt").read_text("utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return [(caption, motion) for caption, motion in rows]


def strips(videos: list[list[Image.Image]], labels: list[str], columns: int = 8) -> Image.Image:
    """A row of frames for each video, evenly spread, behind its label."""
    sheet = Image.new("RGB", (LABEL + columns * (CELL + GAP), len(videos) * (CELL + GAP)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for row, (frames, label) in enumerate(zip(videos, labels, strict=True)):
        words = label.split()
        half = next((k for k in range(1, len(words)) if len(" ".join(words[: k + 1])) > 20), len(words))
        for line, text in enumerate((" ".join(words[:half]), " ".join(words[half:]))):
            draw.text((4, row * (CELL + GAP) + 16 + 16 * line), text, fill="#222", font=font)
        for column, number in enumerate(np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)):
            frame = frames[number].resize((CELL, CELL), Image.Resampling.LANCZOS)
            sheet.paste(frame, (LABEL + column * (CELL + GAP), row * (CELL + GAP)))
    return sheet


def page(videos: list[list[Image.Image]], first: int) -> Image.Image:
    """All frames of some videos, numbered from `first` on."""
    step, rows = PAGE_CELL + GAP, [-(-len(frames) // PAGE_COLUMNS) for frames in videos]
    sheet = Image.new("RGB", (PAGE_COLUMNS * step, sum(rows) * step + 24 * len(videos)), "#888")
    draw, top = ImageDraw.Draw(sheet), 0
    for number, (frames, count) in enumerate(zip(videos, rows, strict=True), first):
        draw.text((4, top + 5), f"clip {number}: {len(frames)} frames, left to right, top to bottom", fill="white")
        for k, frame in enumerate(frames):
            cell = frame.resize((PAGE_CELL, PAGE_CELL), Image.Resampling.LANCZOS)
            sheet.paste(cell, (k % PAGE_COLUMNS * step, top + 24 + k // PAGE_COLUMNS * step))
        top += 24 + count * step
    return sheet


def drawn(
    pipe: Any, texts: list[str], given: argparse.Namespace, accelerator: str, image: str | None = None
) -> list[list[Image.Image]]:
    """A video of each; the first has the seed that was given, the next one more."""
    sources = [torch.Generator().manual_seed(given.seed + k) for k in range(len(texts))]
    return list(pipe(texts, generator=sources, accelerator=accelerator, num_blocks=given.blocks, image=image).frames)


def save_sheet(sheet: Image.Image, path: Path) -> None:
    with atomic_file(path) as temporary:
        sheet.quantize(256).save(temporary, format="PNG", optimize=True)


def show(pipe: Any, given: argparse.Namespace) -> None:
    """Strips of all captions, and the first of each kind as loops, by the checkpoint's own method."""
    texts = [caption for caption, _ in captions(given.captions)]
    videos = drawn(pipe, texts, given, given.accelerator or str(pipe.resolve_method(None).name), given.image_model)
    save_sheet(strips(videos, texts), given.output / "strips.png")
    for number in given.loops or range(0, len(texts), 3):
        name = "-".join(texts[number].split())
        print(pipe.save_video(videos[number], given.output / f"{name}.webp"))


def blind(pipe: Any, given: argparse.Namespace) -> None:
    """Videos and strips in shuffled order; the key is apart."""
    if given.key is None or given.output.resolve() in given.key.resolve().parents:
        raise SystemExit("error: --key must name a file outside of --output, which the viewer sees")
    rows = captions(given.captions)
    videos = drawn(pipe, [caption for caption, _ in rows], given, given.accelerator or "target", given.image_model)
    order = random.Random(given.seed).sample(range(len(rows)), len(rows))
    for place, number in enumerate(order, 1):
        pipe.save_video(videos[number], given.output / f"{place:02d}.webp")
    labels = [f"{place:02d}" for place in range(1, 1 + len(order))]
    save_sheet(strips([videos[number] for number in order], labels), given.output / "sheet.png")
    for start in range(0, len(order), PAGE_CLIPS):
        some = [videos[number] for number in order[start : start + PAGE_CLIPS]]
        save_sheet(page(some, start + 1), given.output / f"page-{start // PAGE_CLIPS + 1}.png")
    lines = [f"{place:02d}\t{rows[number][0]}\t{rows[number][1]}\n" for place, number in enumerate(order, 1)]
    with atomic_file(given.key) as temporary:
        temporary.write_text("".join(lines), "utf-8")
    print(given.output / "sheet.png")


def ranked(pipe: Any, text: str, seed: int, blocks: int | None) -> dict[str, Any]:
    """Scores of each block, as routing scores them: the target's (`target`), the draft of the same past and noise (`draft`),
    and the same block of a video by the drafter alone (`alone`); all decoded in full."""
    scorer = FrameScorer(pipe.resolve_frame_scorer().scorer)  # of all frames
    judge = scorer.bind(pipe.scorer_prompt(text))

    def scored(method: Any) -> tuple[list[float], list[Any]]:
        found, rows, previous = [], [], None
        generator = torch.Generator().manual_seed(seed)
        for block in pipe.stream(text, accelerator=method, num_blocks=blocks, generator=generator, scorer=scorer):
            view = BlockView(block.number, block.latents, block.frames, previous)
            found.append(float(min_score(torch.as_tensor(judge(view)).float().cpu())))
            rows.append(block.record)
            previous = block.frames[-1]
        return found, rows

    own, rows = scored(VideoMethod("rank", policy=Threshold(math.inf), target_blocks=()))
    return {"caption": text, "target": own, "draft": [row.score for row in rows], "alone": scored("draft")[0]}


def rank(pipe: Any, given: argparse.Namespace) -> None:
    """The shares of blocks in which the target is above, each with its standard error over videos."""
    pipe.preview_decoder = None
    rows = [ranked(pipe, caption, given.seed + k, given.blocks) for k, (caption, _) in enumerate(captions())]
    said: dict[str, Any] = {
        "model": given.model, "machine": describe_machine(), "videos": len(rows),
        "mean": {name: float(np.mean([row[name] for row in rows])) for name in ("target", "draft", "alone")},
    }  # fmt: skip
    for name in ("draft", "alone"):
        shares = np.array([np.mean(np.array(row["target"]) > np.array(row[name])) for row in rows])
        known = shares[:KNOWN]
        said[f"target_above_{name}"] = {
            "share": float(shares.mean()), "standard_error": float(shares.std(ddof=1) / len(shares) ** 0.5),
            "in_the_words_of_training": float(known.mean()),
        }  # fmt: skip
        print(f"target above drafter ({name}) in {shares.mean():.1%} of blocks, {known.mean():.1%} where words are known")
    with atomic_file(given.output) as temporary:
        temporary.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n", "utf-8")


def gain(pipe: Any, given: argparse.Namespace) -> None:
    """The score of each video's caption minus the mean score of the other captions, by method."""
    texts = [caption for caption, _ in captions(given.captions)]
    prompts, scorer = [pipe.scorer_prompt(text) for text in texts], pipe.resolve_frame_scorer().scorer
    start = pipe.setting("image_frames") if given.image_model else 0
    rows: list[dict[str, Any]] = []
    for method in GAIN_METHODS:
        scores = np.zeros((len(texts), len(texts)))
        drafts = []
        for row, text in enumerate(texts):
            generator, image = torch.Generator().manual_seed(given.seed + row), given.image_model
            made = pipe(text, generator=generator, accelerator=method, num_blocks=given.blocks, image=image)
            shown = made.frames[0][start + 1 :: 4]
            drafts.append(np.mean([source == "draft" for source in made.stats.sources]))
            for column, prompt in enumerate(prompts):
                scores[row, column] = np.mean(np.asarray(scorer.score(shown, [prompt] * len(shown))))
        own = np.diag(scores)
        gains = own - (scores.sum(1) - own) / (len(texts) - 1)
        rows.append({
            "method": method, "gain": float(gains.mean()), "standard_error": float(gains.std(ddof=1) / len(gains) ** 0.5),
            "drafts": float(np.mean(drafts)), "gains": gains.round(2).tolist(),
        })  # fmt: skip
        print(f"{method}: {gains.mean():.2f}, {np.mean(drafts):.0%} of blocks by the drafter", flush=True)
    said = {"model": given.model, "machine": describe_machine(), "captions": given.captions, "image_model": given.image_model}
    with atomic_file(given.output) as temporary:
        temporary.write_text(json.dumps({**said, "rows": rows}, indent=1) + "\n", "utf-8")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("show", "blind", "rank", "gain"))
    parser.add_argument("--model", default="emoji-video")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--key", type=Path, help="of blind: what was drawn, for whoever compares the viewer's answers")
    parser.add_argument("--accelerator", help="default: the checkpoint's own; of blind: target")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--captions", default="motion", choices=("motion", "moving"), help="list of captions in assets")
    parser.add_argument("--image-model", help="generates the image that each video starts from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loops", type=int, nargs="*", help="of show: which captions become loops, from 0")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    pipe: Any = open_pipeline(given.model)
    pipe.set_progress_bar_config(disable=True)
    (given.output.parent if given.what in ("rank", "gain") else given.output).mkdir(parents=True, exist_ok=True)
    {"show": show, "blind": blind, "rank": rank, "gain": gain}[given.what](pipe, given)


if __name__ == "__main__":
    main()
