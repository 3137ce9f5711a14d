"""Parts and methods that cannot be are refused by the name of what is wrong, before a model runs.

That every setting of every preset is checked is in `test_methods`; here is what no setting of a preset reaches.
"""

import math

import pytest
import torch
from rejects import rejects
from tiny_video import LEVELS, stream, transformer

from vargen.adapters.causal_video import CausalVideoBlockModel
from vargen.decoding import (
    PRESETS,
    Accelerator,
    AutoWindow,
    DynamicTree,
    Eagle,
    GroupedRule,
    Jacobi,
    JacobiTree,
    Lookup,
    Medusa,
    NeighborhoodRule,
    PooledRule,
    Recycle,
    Sampling,
    ScaleSchedule,
    Speculative,
    SpeculativeTree,
    Stage,
    StaticTree,
    Threshold,
    TypicalRule,
    VideoMethod,
    k_seq,
    speculative_sampling,
    traversal,
)
from vargen.decoding.next_token.drafters import LayerSkip, Wavefront
from vargen.decoding.next_token.trees.shapes import make_fan
from vargen.decoding.video.denoising import shift_level, shifted_levels
from vargen.evaluation.table_models import TableModel

SMALL = TableModel(vocab=3, tokens=5)
# Of another grid than its example tokens, and without layers to skip.
WITH_BOOK = TableModel(vocab=3, tokens=5)
WITH_BOOK.codebook, WITH_BOOK.num_layers = torch.eye(3), 0
WITH_BOOK.example_tokens = torch.zeros(3, 8)
THREE_FRAMES = CausalVideoBlockModel(transformer(1, block_frames=3), LEVELS)
FAN = JacobiTree(make_fan(8, 2, 2))


def method(drafter, rule):
    return Accelerator("x", drafter, rule)


@pytest.mark.parametrize(("make", "argument"), [
    (lambda: Sampling(temperature=math.inf), "temperature"),
    (lambda: Sampling(top_k=2.5), "top_k"),
    (lambda: Sampling(top_k=True), "top_k"),
    (lambda: Sampling(top_k=101).validate_top_k(100), "top_k"),
    (lambda: Sampling(top_p=1.1), "top_p"),
    (lambda: Jacobi(1), "window"),
    (lambda: Jacobi("autoo"), "'auto'"),
    (lambda: Jacobi(coupling="maximum"), "'maximal'"),
    (lambda: Jacobi(initial="uniformly"), "'uniform'"),
    (lambda: AutoWindow(1), "max_width"),
    (lambda: AutoWindow(ema_decay=1.0), "ema_decay"),
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
    (lambda: PooledRule(radius=5).bind(WITH_BOOK), "radius"),
    (lambda: PooledRule().bind(SMALL), "codebook"),
    (lambda: Wavefront(8, coupling="maximal"), "coupling"),
    (lambda: Jacobi(4, initial="low-res").bind(SMALL), "need a model"),
    (lambda: LayerSkip(skip=1.0), "skip"),
    (lambda: LayerSkip().bind(WITH_BOOK), "skip"),
    (lambda: Lookup(2).bind(WITH_BOOK), "example_tokens"),
    (lambda: LayerSkip(skip=()), "skip"),
    (lambda: LayerSkip(skip="2+2"), "each once"),
    (lambda: Lookup(9).bind(SMALL), "length"),
    (lambda: Lookup(image_weight=0, max_matches=0), "image_weight"),
    (lambda: Recycle(9).bind(SMALL), "length"),
    (lambda: StaticTree((-1, 0, 3)), "parents"),
    (lambda: StaticTree((-1,)), "256 slots"),
    (lambda: StaticTree("wide-16"), "'wide-15'"),
    (lambda: DynamicTree(nodes=50, depth=2, children=3), "nodes"),
    (lambda: DynamicTree(acceptance=(0.5, 0.6)), "acceptance"),
    (lambda: make_fan(6, 3, 2), "width"),
    (lambda: SpeculativeTree(child_sampling="warm"), "child_sampling"),
    (lambda: SpeculativeTree(DynamicTree(), "with-replacement"), "StaticTree"),
    (lambda: JacobiTree((-1, 0, 0, 2, 3)), "depth"),
    (lambda: SpeculativeTree(DynamicTree(4, 2, 4), model=SMALL).bind(SMALL), "vocabulary"),
    (lambda: SpeculativeTree(DynamicTree(5, 5, 2), model=SMALL).bind(SMALL), "depth"),
    (lambda: Speculative(2, model=TableModel(4, 5)).bind(SMALL), "vocabulary"),
    (lambda: Eagle(2).bind(SMALL), "(eagle)"),
    (lambda: Medusa(2).bind(SMALL), "(medusa)"),
    (lambda: method(Eagle(), speculative_sampling), "verifies a chain"),
    (lambda: method(SpeculativeTree(), speculative_sampling), "verifies a chain"),
    (lambda: method(Eagle(child_sampling="shared-noise"), traversal), "traversal"),
    (lambda: method(Jacobi(4), traversal), "every pass"),
    (lambda: method(FAN, traversal), "every pass"),
    (lambda: method(Speculative(3, shared_noise=True), traversal), "every pass"),
    (lambda: method(SpeculativeTree(StaticTree("wide-15"), "shared-noise"), traversal), "every pass"),
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
    (lambda: Jacobi(2.5), "window"),
    (lambda: Jacobi(initial=3), "initial"),
    (lambda: StaticTree(7), "tree"),
    (lambda: JacobiTree(DynamicTree()), "StaticTree"),
    (lambda: Eagle(None), "shape"),
    (lambda: Eagle(model=SMALL), "model"),
    (lambda: Accelerator(drafter=Jacobi(4), acceptance=GroupedRule), "acceptance"),
    (lambda: Accelerator(drafter="jacobi"), "drafter"),
    (lambda: ScaleSchedule(stages=(3,)), "stages"),
])  # fmt: skip
def test_what_is_of_another_type_is_refused(make, argument: str) -> None:
    rejects(make, argument, TypeError)
