"""`vargen generate`: generate image or video files from prompts or classes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import import_libraries, quiet_libraries
from vargen.cli.inputs import MAX_IMAGES, SourceFiles, collect_prompts
from vargen.cli.options import (
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Guidance,
    ModelName,
    QuantizationName,
    Temperature,
    Threads,
    TopK,
    TopP,
    check_names,
    explicit_options,
    makes_video,
    reject_options,
)
from vargen.device import set_threads
from vargen.files import expand_user
from vargen.values import MAX_SEED


@dataclass(frozen=True)
class GenerateOptions:
    """What images and videos have in common: see `vargen generate --help`.

    Attributes:
        prompts: or class labels as typed, one per prompt. repeats: images of each. first_seed: of the first image.
    """

    prompts: list[str]
    repeats: int
    first_seed: int
    model: str
    accelerator: str | None
    output: str | None
    prompt_file: Path | None
    scorer: str | None
    device: Device
    dtype: Dtype
    quantization: str | None
    as_json: bool
    quiet: bool

    @property
    def model_title(self) -> str:
        """The model as files and JSON name it: without local paths."""
        return Path(self.model).resolve().name if Path(self.model).is_dir() else self.model

    def jobs(self) -> list[tuple[str, int]]:
        """Return prompt and seed of each image."""
        repeated = (prompt for prompt in self.prompts for _ in range(self.repeats))
        return [(prompt, self.first_seed + k) for k, prompt in enumerate(repeated)]


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...|-", help="What to generate; -: prompts from stdin, one per line.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR",
            help="A .png, .jpg or .webp file (video: .mp4, .gif or .webp), which is overwritten if it exists and numbered from "
            "1 for several images; or a folder, which ends with / or has no suffix. Default: a new file in the current folder, "
            "named after prompt and seed.",
        ),
    ] = None,
    contact_sheet: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write one image of all images with their prompts.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE|-", help="UTF-8, one prompt per line; blank lines and lines starting with # are skipped."),
    ] = None,
    model: ModelName = "emoji",
    class_label: Annotated[
        list[str] | None, typer.Option(metavar="N|NAME", help="Class to generate, instead of a prompt; may be repeated.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image to start from, of the model's size (next-scale models, video).")
    ] = None,
    mask_image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="White, or transparent, where --image is regenerated; of the same size.")
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(metavar="X", help="Fraction of the scales that are regenerated, 0 to 1. Default: 0.8, and 1 with a mask."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_SEED, metavar="N", help="Seed of the first image; the next has seed + 1. Default: random."
        ),
    ] = None,
    num_images_per_prompt: Annotated[
        int, typer.Option("--num-images-per-prompt", "-n", metavar="N", help="Images of each prompt.")
    ] = 1,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Method, also with settings as in gumbel:window=8; `vargen info presets` lists them. Default: the model's.",
        ),
    ] = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What guidance leads away from.")] = None,
    best_of: Annotated[
        int, typer.Option(min=1, metavar="N", help="Generate N candidates of each image and keep the best.")
    ] = 1,
    scorer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Selects the best; see --scorers of `vargen eval`. Default: emoji-scorer."),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Video: number of blocks. Default: the model's.")
    ] = None,
    tau: Annotated[
        float | None, typer.Option(metavar="X", help="Video: score that a drafted block needs, on the scorer's scale.")
    ] = None,
    motion: Annotated[
        int | None, typer.Option(metavar="N", help="Video: level of motion, for models trained with one.")
    ] = None,
    image_model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR|none", help="Video: generates the image to start from. Default: the model's own."),
    ] = None,
    dtype: DtypeName = Dtype.auto,
    quantization: QuantizationName = None,
    device: DeviceName = Device.auto,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Images generated at once, including candidates.")] = 8,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of file names.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar and no summary.")] = False,
) -> None:  # fmt: skip
    """Generate images from prompts and print the name of each file.

    Image k of a run has the seed `seed + k` and does not depend on the others, so it can be reproduced alone.
    """
    subjects = collect_prompts(prompts, prompt_file, class_label)
    sampling = explicit_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    negative_prompt = negative_prompt or None  # an empty negative prompt has no effect
    check_names(model, () if accelerator is None else [accelerator])

    from vargen.pipelines import validation

    if not class_label:
        validation.validate_prompts(subjects)
    validation.validate_num_images(num_images_per_prompt, 1)
    if negative_prompt is not None:
        validation.validate_prompts(negative_prompt, "negative_prompt")
    count = len(subjects) * num_images_per_prompt
    if count > MAX_IMAGES:
        raise ValueError(f"the number of images must be at most {MAX_IMAGES}, got {count}")
    first_seed = secrets.randbelow(2**32) if seed is None else seed
    validation.validate_seed(first_seed, count)
    import_libraries()
    set_threads(threads)
    options = GenerateOptions(
        subjects, num_images_per_prompt, first_seed, model, accelerator, output,
        prompt_file and expand_user(prompt_file, "prompt_file"), scorer, device, dtype, quantization, as_json, quiet,
    )  # fmt: skip
    source = SourceFiles.expand(image, mask_image, strength)
    for_images = {"class_label": class_label, "mask_image": mask_image, "strength": strength, "contact_sheet": contact_sheet}
    for_video = {"num_blocks": num_blocks, "tau": tau, "motion": motion, "image_model": image_model}
    quiet_libraries()
    if makes_video(model):
        from vargen.cli.generate_video import generate_videos

        more = {"negative_prompt": negative_prompt, "best_of": best_of > 1, **sampling}
        reject_options("is for image models, and this model generates video", **for_images, **more)
        generate_videos(options, source.image, explicit_options(**for_video))
        return
    from vargen.cli.generate_images import ImageOptions, generate_image_files

    reject_options("is for video models, such as emoji-video", **for_video)
    own = ImageOptions(bool(class_label), contact_sheet, source, sampling, negative_prompt, best_of, batch_size)
    generate_image_files(options, own)
