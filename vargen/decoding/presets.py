"""Presets: methods by name, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.accelerator import Accelerator
from vargen.decoding.acceptance import Grouped, exact, shared_noise
from vargen.decoding.drafters import Jacobi, Speculative
from vargen.decoding.naming import nearest
from vargen.values import shown

DEFAULT = "auto"  # what pipelines, page and command draw with
PRESETS: dict[str, Accelerator] = {
    preset.name: preset
    for preset in (
        Accelerator(
            name=DEFAULT,
            drafter=Jacobi(window="auto", coupling="gumbel"),
            acceptance=shared_noise,
            summary="the picture of ar, by gumbel where measured costs say that drafting pays, else token by token",
            source="as gumbel",
        ),
        Accelerator(
            name="ar",
            summary="one token a pass, in raster order: the sequential baseline",
            source="Sun et al. 2024, LlamaGen",
        ),
        Accelerator(
            name="sjd",
            drafter=Jacobi(window=16, coupling="independent"),
            acceptance=exact,
            summary="a window of drafts, redrawn from the last pass; p/q acceptance",
            source="Teng et al. 2024, arXiv 2410.01699",
        ),
        Accelerator(
            name="scd",
            drafter=Jacobi(window=16, coupling="maximal"),
            acceptance=exact,
            summary="sjd whose drafts survive by maximal coupling",
            source="SCD 2025, arXiv 2510.24211",
        ),
        Accelerator(
            name="gumbel",
            drafter=Jacobi(window=16, coupling="gumbel"),
            acceptance=shared_noise,
            summary="the same picture as ar for the same seed, in fewer passes",
            source="SCD 2025, arXiv 2510.24211, with shared-noise acceptance",
        ),
        Accelerator(
            name="gsd",
            drafter=Jacobi(window=16, coupling="maximal"),
            acceptance=Grouped(),
            summary="scd that judges a draft by the mass of a group around it",
            source="So et al. 2025, arXiv 2508.07747",
        ),
        Accelerator(
            name="speculative",
            drafter=Speculative(),
            acceptance=exact,
            summary="a small model drafts a chain; p/q acceptance",
            source="Leviathan et al. 2023, arXiv 2211.17192",
        ),
    )
}


def methods_of(family: str) -> list[Accelerator]:
    """The presets for models of a family, such as `"next-token"`."""
    return [preset for preset in PRESETS.values() if preset.family == family]


def resolve_accelerator(accelerator: str | Accelerator, family: str = Accelerator.family) -> Accelerator:
    """A preset by name, or the object itself.

    Args:
        family: of the model that is to run it.

    Raises:
        ValueError: for an unknown name (names the nearest), or a method for models of another family.
        TypeError: for anything else.
    """
    names = [preset.name for preset in methods_of(family)]
    if isinstance(accelerator, str):
        if accelerator not in PRESETS:
            raise ValueError(f"unknown accelerator {shown(accelerator)}; {nearest(accelerator, names)}")
        accelerator = PRESETS[accelerator]
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be a preset's name or an Accelerator, got {shown(accelerator)}")
    if accelerator.family != family:
        raise ValueError(
            f"accelerator {accelerator.name!r} is for {accelerator.family} models, and this is a {family} one: it runs "
            f"{', '.join(names)}"
        )
    return accelerator
