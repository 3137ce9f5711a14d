"""The presets of next-scale models, each a few lines of data."""

from __future__ import annotations

from vargen.decoding.next_scale.schedule import ScaleSchedule, Stage

NEXT_SCALE_METHODS: tuple[ScaleSchedule, ...] = (
    ScaleSchedule(
        name="plain",
        summary="one scale a pass: the sequential baseline",
        source="Tian et al. 2024, VAR, arXiv 2404.02905",
    ),
    ScaleSchedule(
        name="code",
        stages=(Stage(until=-2), Stage(model="draft")),
        summary="collaborative decoding: the last two scales, most of the tokens, by the small model",
        source="Chen et al. 2024, CoDe, arXiv 2411.17787",
    ),
    ScaleSchedule(
        name="scale-spec",
        stages=(Stage(until=4, drafted=3), Stage()),
        summary="early scales drafted by the small model, judged whole in one pass of the large one",
        source="Leviathan et al. 2023, arXiv 2211.17192, with a maximal coupling of whole scales",
        experimental=True,
    ),
    ScaleSchedule(
        name="economy",
        stages=(Stage(until=-1), Stage(guidance=0)),
        summary="the last scale without guidance, at half its work",
        source="as plain",
        experimental=True,
    ),
)
