"""Training recipes: frozen data read from a TOML file, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import tomllib
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from vargen.training.focus import Focus

logger = logging.getLogger("vargen")

PACKAGED = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate: linear warm-up, constant, then a linear decay to zero.

    The constant middle makes a run extensible: more `steps` on resume move only the decay.
    """

    steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.3

    def __post_init__(self) -> None:
        at_least(self, 1, "steps")
        at_least(self, 0, "warmup_steps", "learning_rate", "decay_fraction")

    def factor(self, step: int) -> float:
        """Multiplier of the learning rate at `step` (from 0), in [0, 1]."""
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        decay_steps = max(self.decay_fraction * self.steps, 1.0)
        return max(0.0, min(warm, (self.steps - step) / decay_steps))


@dataclass(frozen=True)
class TokenizerConfig:
    """How to train a `VQModel`. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 32
    crop: int = 64  # pixels; crops of the content teach more per multiply than the white around it
    full_fraction: float = 0.15  # last part of training: whole pictures, as used later
    autoencoder_steps: int = 200  # before the codebook is fitted by k-means: nothing is quantised
    decoder_steps: int = 0  # last ones: encoder and codebook stay, so tokens do, and the decoder learns from whole pictures
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    colour_weight: float = 2.0
    commitment_weight: float = 0.25
    plain_weight: float = 10.0  # commitment of patches of one plain colour, which share a code; 0 lets each choose
    codebook_decay: float = 0.98
    revive_every: int = 50
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "crop", "revive_every", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "autoencoder_steps", "decoder_steps", "full_fraction")
        check_phases(self.schedule, self.autoencoder_steps, self.decoder_steps)


@dataclass(frozen=True)
class NextTokenConfig:
    """How to train a `LlamaGenTransformer` on tokens. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    focus: Focus = field(default_factory=Focus)
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.1
    caption_rows: int = 16  # longer captions are cut: one shape for all batches
    shift_pixels: int = 8  # augmentation: each picture is tokenised at several offsets up to this
    shift_variants: int = 0
    mirrored: float = 0.0  # share of pictures that are mirrored, where nothing is written and no side is named
    recoloured: float = 0.15  # share of the pictures of one dominant colour that get another, and its word in the caption
    dropout: float = 0.0
    token_noise: float = 0.1  # share of input tokens that are other pictures', per picture from 0 to this
    wrong_starts: float = 0.0  # share of pictures whose input begins with another picture's tokens
    near_noise: float = 0.0  # share of input tokens that are codes like the right one, per picture from 0 to this
    start_weight: float = 1.0  # of the tokens with which a picture begins in the loss; those in the midst of it count 1
    optimizer: str = "muon"  # Muon for the matrices, AdamW for the rest; or "adamw" for all
    adamw_learning_rate: float = 3e-3
    adamw_beta2: float = 0.996
    weight_decay: float = 0.05
    averaged: float = 0.05  # last part of training whose weights are averaged
    drawn: int = 64  # pictures that are drawn and judged at each evaluation; 0 for none
    compile: bool = False
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "caption_rows", "evaluate_every", "checkpoint_every")
        at_least(self, 1, "start_weight")
        at_least(self, 0, "shift_pixels", "shift_variants", "dropout", "weight_decay", "drawn")
        noise = ("token_noise", "wrong_starts", "near_noise")
        for name in ("caption_dropout", "mirrored", "recoloured", *noise, "averaged", "adamw_beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {getattr(self, name)!r}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")


@dataclass(frozen=True)
class ScorerConfig:
    """How to train an `ImageTextModel` on pictures and captions. `model` holds the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64
    sizes: list[int] = field(default_factory=lambda: [64, 64, 96])  # pixels of a side, one of them for each step
    tokenized: float = 0.5  # share of pictures that passed through the image tokenizer, where such a copy is at hand
    tokenized_per_step: int = 4  # such copies made anew in each step
    wrong_codes: float = 0.15  # most of the tokens that are wrong in such a copy
    recoloured: float = 0.3  # share of pictures with a colour in their name that change both
    label_smoothing: float = 0.05
    pair_weight: float = 1.0  # of the loss over (picture, caption with style) pairs beside that over concepts
    weight_decay: float = 0.1
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "tokenized_per_step", "pair_weight", "weight_decay")
        if not self.sizes or any(size < 16 or size % 16 for size in self.sizes):
            raise ValueError(f"sizes must be multiples of 16, at least one, got {self.sizes}")


def check_phases(schedule: Schedule, autoencoder_steps: int, decoder_steps: int) -> None:
    """Raise ValueError unless a tokenizer's run has steps for its codebook between its first and its last phase."""
    spoken_for = autoencoder_steps + decoder_steps
    if schedule.steps <= spoken_for:
        raise ValueError(
            f"steps must be at least {spoken_for + 1}, got {schedule.steps}: autoencoder_steps ({autoencoder_steps}) before "
            f"anything is quantised, then some for the codebook, then decoder_steps ({decoder_steps})"
        )


def at_least(recipe: Any, least: int, *names: str) -> None:
    """Raise ValueError for a field below `least`, or no number."""
    for name in names:
        if not getattr(recipe, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(recipe, name)!r}")


R = TypeVar("R")


def _warmed_up(recipe: R) -> R:
    """With a warm-up that ends within the run; else it would never come to the learning rate that it names."""
    changed: Any = recipe
    schedule: Schedule = changed.schedule
    if schedule.warmup_steps <= schedule.steps:
        return recipe
    logger.warning("the warm-up of %d steps is cut to the run's %d", schedule.warmup_steps, schedule.steps)
    return replace(changed, schedule=replace(schedule, warmup_steps=schedule.steps))


def load_config(source: str | Path, kind: type[R], steps: int | None = None) -> R:
    """Read a recipe from a TOML file, or a packaged one by name (`emoji-tokenizer`, `emoji-generator`, ...).

    Args:
        steps: length of the run, instead of the recipe's. A warm-up that is longer than the run is cut to it, with a warning.

    Raises:
        FileNotFoundError: if neither a file nor a packaged recipe has that name.
        ValueError: for malformed TOML, a key that the recipe lacks (names the nearest), a value of a wrong type, or parts that
            do not fit into the steps.
    """
    path = Path(source)
    if not path.is_file():
        path = PACKAGED / f"{source}.toml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.toml")))
            raise FileNotFoundError(
                f"recipe {str(source)!r} is neither a file nor a packaged recipe ({known})"
            )
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {path}: not valid TOML: {error}") from error
    recipe: Any = build(kind, values, str(path))
    if steps is not None:
        try:
            recipe = replace(recipe, schedule=replace(recipe.schedule, steps=steps))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return _warmed_up(recipe)


def build(kind: type[R], values: dict[str, Any], where: str) -> R:
    """An instance of the dataclass `kind` from nested `values`; unknown keys and wrong types are errors."""
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise ValueError(
                f"{where}: unknown key {key!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(hints)}")
            )
        expected = hints[key]
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            value = build(expected, value, f"{where} [{key}]")
        else:
            origin = typing.get_origin(expected) or expected
            accepted: Any = (int, float) if origin is float else origin
            if (
                isinstance(accepted, types.UnionType)
                or (isinstance(value, accepted)
                and not (isinstance(value, bool) and origin is not bool))
            ):
                value = float(value) if origin is float else value
            else:
                raise ValueError(f"{where}: {key} must be {expected}, got {value!r}")
        arguments[key] = value
    missing = [
        f.name
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
