"""The presets of next-scale models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.next_scale.schedule import ScaleSchedule, Stage

NEXT_SCALE_METHODS: tuple[ScaleSchedule, ...] = (
    ScaleSchedule(
        name="plain",
        summary="one scale per pass: the sequential baseline",
        source="Tian et al. 2024, VAR, arXiv 2404.02905",
    ),
    ScaleSchedule(
        name="code",
        stages=(Stage(until=0.8), Stage(model="draft")),
        summary="collaborative decoding: the small model generates the last fifth of the scales, half of the tokens or more",
        source="Chen et al. 2024, CoDe, arXiv 2411.17787",
    ),
    ScaleSchedule(
        name="economy",
        stages=(Stage(until=-1), Stage(guidance=0)),
        summary="the last scale without guidance, at half the cost",
        source="as plain",
        experimental=True,
    ),
)
