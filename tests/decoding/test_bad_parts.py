"""Parts and methods that cannot be are refused by the name of what is wrong, before a model runs.

That every setting of every preset is checked is in `test_methods`; here is what no setting of a preset reaches.
"""

import math

import pytest
import torch
from rejects import rejects
from table_methods import SharedTree
from tiny_video import LEVELS, stream, transformer

from vargen.decoding import (
    PRESETS,
    Accelerator,
    DynamicTree,
    Eagle,
    GroupedRule,
    Jacobi,
    Medusa,
    NeighborhoodRule,
    PooledRule,
    Sampling,
    ScaleSchedule,
    Speculative,
    Stage,
    Threshold,
    VideoMethod,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import (
    EagleSharedNoise,
    JacobiTree,
    LayerSkip,
    Lookup,
    SampledTree,
    SpeculativeTree,
    TypicalRule,
    Wavefront,
    k_seq,
)
from vargen.decoding.video.denoising import shift_level, shifted_levels
from vargen.models.causal_video.decoding import CausalVideoBlockModel
from vargen.verify.tables import TableLowRes, TableModel

SMALL = TableModel(vocab=3, tokens=5)
# Without layers to skip.
WITH_BOOK = TableModel(vocab=3, tokens=5)
WITH_BOOK.codebook, WITH_BOOK.num_layers = torch.eye(3), 0
OTHER_TOKENS = TableModel(3, 5)
OTHER_TOKENS.low_res = TableLowRes(TableModel(4, 5))
THREE_FRAMES = CausalVideoBlockModel(transformer(1, block_frames=3), LEVELS)
FAN = JacobiTree(7, 2, 2)


def method(drafter, rule):
    return Accelerator("x", drafter, rule)


@pytest.mark.parametrize(("make", "argument"), [
    (lambda: Sampling(temperature=math.inf), "temperature"),
    (lambda: Sampling(top_k=2.5), "top_k"),
    (lambda: Sampling(top_k=True), "top_k"),
    (lambda: Sampling(top_k=101).validate_top_k(100), "top_k"),
    (lambda: Sampling(top_p=1.1), "top_p"),
    (lambda: Sampling(min_p=-0.1), "min_p"),
    (lambda: Sampling(min_p=1.1), "min_p"),
    (lambda: Jacobi(1), "window"),
    (lambda: Jacobi(2.5), "window"),
    (lambda: Jacobi("autoo"), "'auto'"),
    (lambda: Jacobi(coupling="maximum"), "'maximal'"),
    (lambda: Jacobi(initial="uniformly"), "'uniform'"),
    (lambda: Jacobi(initial=3), "initial"),
    (lambda: Speculative("auto"), "length"),
    (lambda: GroupedRule(delta=1.5), "delta"),
    (lambda: GroupedRule(distance=0.0), "distance"),
    (lambda: GroupedRule(budget=-1.0), "budget"),
    (lambda: GroupedRule(tightening=math.inf), "tightening"),
    (lambda: GroupedRule(distance=0.5).bind(SMALL), "codebook"),
    (lambda: NeighborhoodRule(ratio=None), "ratio, delta"),
    (lambda: NeighborhoodRule().bind(SMALL), "codebook"),
    (lambda: TypicalRule(epsilon=1.1), "epsilon"),
    (lambda: TypicalRule(alpha=0.0), "alpha"),
    (lambda: PooledRule(threshold=0), "threshold"),
    (lambda: PooledRule().bind(SMALL), "codebook"),
    (lambda: Wavefront(8, coupling="maximal"), "coupling"),
    (lambda: Jacobi(4, initial="low-res").bind(SMALL, 1), "need a model"),
    (lambda: Jacobi(4, initial="low-res").bind(OTHER_TOKENS, 1), "vocabulary"),
    (lambda: LayerSkip(skip=1.0), "skip"),
    (lambda: LayerSkip().bind(WITH_BOOK, 1), "skip"),
    (lambda: LayerSkip(skip=()), "skip"),
    (lambda: LayerSkip(skip="2+2"), "each once"),
    (lambda: Lookup(sharpness=0), "sharpness"),
    (lambda: DynamicTree(nodes=256), "nodes"),
    (lambda: DynamicTree(nodes=50, depth=2, children=3), "nodes"),
    (lambda: JacobiTree(5, 3, 2), "nodes"),
    (lambda: JacobiTree(256), "nodes"),
    (lambda: JacobiTree(depth=0), "depth"),
    (lambda: SampledTree(branching=(256,)), "children"),
    (lambda: SampledTree(branching=(2,), model=SMALL).bind(TableModel(4, 5), 1), "vocabulary"),
    (lambda: Speculative(2, model=TableModel(4, 5)).bind(SMALL, 1), "vocabulary"),
    (lambda: Eagle(DynamicTree(2, 2, 1)).bind(SMALL, 1), "(eagle)"),
    (lambda: Medusa(DynamicTree(2, 2, 1)).bind(SMALL, 1), "(medusa)"),
    (lambda: method(Eagle(), speculative_sampling), "verifies a chain"),
    (lambda: method(SpeculativeTree(), speculative_sampling), "verifies a chain"),
    (lambda: method(EagleSharedNoise(), traversal), "traversal"),
    (lambda: method(Jacobi(4), traversal), "every pass"),
    (lambda: method(FAN, traversal), "every pass"),
    (lambda: method(Speculative(3, shared_noise=True), traversal), "every pass"),
    (lambda: method(SharedTree(), traversal), "every pass"),
    (lambda: method(SpeculativeTree(), k_seq), "with replacement"),
    (lambda: method(FAN, k_seq), "with replacement"),
    (lambda: Stage(model="none"), "model"),
    (lambda: Stage(until=1.5), "until"),
    (lambda: Stage(guidance=-1), "guidance"),
    (lambda: Threshold(math.nan), "tau"),
    (lambda: PRESETS["stride"].with_tau(0.0), "tau"),
    (lambda: VideoMethod(exit_step=1.5), "exit_step"),
    (lambda: VideoMethod(target_blocks=(-1,)), "target_blocks"),
    (lambda: shifted_levels((250, 500)), "steps"),
    (lambda: shifted_levels((1001,)), "steps"),
    (lambda: shift_level(1.1, 5), "level"),
    (lambda: stream("sdvg", blocks=10**9), "blocks"),
    (lambda: stream("sdvg", score=None), "scorer"),
    (lambda: stream("sdvg", given=[torch.zeros(1, 1, 3, 2, 2)]), "given"),
    (lambda: stream("sdvg", model=CausalVideoBlockModel(transformer(0), LEVELS)), "draft"),
    (lambda: stream("sdvg", model=CausalVideoBlockModel(transformer(0), LEVELS, draft_model=THREE_FRAMES)), "latents"),
    (lambda: stream("sjd"), "next-token"),
])  # fmt: skip
def test_it_is_refused_by_name(make, argument: str) -> None:
    rejects(make, argument)


@pytest.mark.parametrize(("make", "argument"), [
    (lambda: SpeculativeTree("wide-15"), "shape"),
    (lambda: Eagle(None), "shape"),
    (lambda: Eagle(model=SMALL), "model"),
    (lambda: Accelerator(drafter=Jacobi(4), acceptance=GroupedRule), "acceptance"),
    (lambda: Accelerator(drafter="jacobi"), "drafter"),
    (lambda: ScaleSchedule(stages=(3,)), "stages"),
])  # fmt: skip
def test_what_is_of_another_type_is_refused(make, argument: str) -> None:
    rejects(make, argument, TypeError)
