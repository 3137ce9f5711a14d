"""A table model that every method can run, and every preset and rule, fitted to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from initial_drafts import MixtureJacobi

from vargen.decoding import (
    Accelerator,
    DynamicTree,
    Eagle,
    GroupedRule,
    Jacobi,
    Medusa,
    NeighborhoodRule,
    PooledRule,
    Sampling,
    Speculative,
    decode,
    list_methods,
    shared_noise,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import (
    EagleSharedNoise,
    EagleTopK,
    JacobiTree,
    LayerSkip,
    Lookup,
    MixtureRule,
    Recycle,
    SampledTree,
    SpeculativeTree,
    TypicalRule,
    Wavefront,
    WavefrontRule,
    k_seq,
    recursive_rejection,
)
from vargen.decoding.experimental.eagle_children import SharedNoise, TopK
from vargen.decoding.relaxed_rules import RelaxedRule
from vargen.verify.tables import TableEagle, TableLowRes, TableMedusa, TableModel

VOCAB, TOKENS = 9, 30


def table_model(tokens: int = TOKENS, rows: int = 5) -> TableModel:
    """With a codebook and drafters of every kind, which know a table that is similar but not equal."""
    model = TableModel(vocab=VOCAB, tokens=tokens, seed=6, rows=rows)
    similar = TableModel(vocab=VOCAB, tokens=tokens, seed=8, rows=rows)
    similar.table = model.table + 0.5 * similar.table
    model.codebook = codebook(VOCAB)
    model.draft_model, model.low_res = similar, TableLowRes(similar)
    model.draft_heads = {"eagle": TableEagle(similar), "medusa": TableMedusa(similar)}
    return model


RELAXED_RULES: dict[str, RelaxedRule] = {
    "grouped": GroupedRule(size=4, delta=1.0),
    "neighborhood by ratio": NeighborhoodRule(size=4, ratio=3.0),
    "neighborhood by delta": NeighborhoodRule(size=8, ratio=None, delta=0.5),
    "neighborhood by both": NeighborhoodRule(size=3, ratio=4.0, delta=0.2),
    "typical": TypicalRule(epsilon=0.5, alpha=0.6),
    "mixture": MixtureRule(weight=0.6),
    "pooled": PooledRule(size=2, threshold=0.5),
}
TREE_RULES = {name: rule for name, rule in RELAXED_RULES.items() if "tree" in rule.topologies}


@dataclass(frozen=True)
class TopKTree(SpeculativeTree):
    children = TopK()


@dataclass(frozen=True)
class SharedTree(SpeculativeTree):
    provides = ()
    children = SharedNoise()


@dataclass(frozen=True)
class SharedMedusa(Medusa):
    provides = ()
    children = SharedNoise()


_DYNAMIC = DynamicTree(nodes=7, depth=3, children=3)
_EXACT = {
    "jacobi, independent": (MixtureJacobi(6, "independent"), speculative_sampling),
    "jacobi, maximal": (MixtureJacobi(6, "maximal"), speculative_sampling),
    "jacobi, gumbel": (MixtureJacobi(6, "gumbel"), shared_noise),
    "jacobi, low-res": (Jacobi(6, "maximal", "low-res"), speculative_sampling),
    "jacobi tree": (JacobiTree(7, 2, 2, "gumbel"), shared_noise),
    "draft model": (Speculative(3, shared_noise=True), shared_noise),
    "draft model, k-seq": (SampledTree(branching=(4, 2, 1)), k_seq),
    "draft model, top-k": (TopKTree(_DYNAMIC), recursive_rejection),
    "draft model, shared noise": (SharedTree(_DYNAMIC), shared_noise),
    "draft model, wide frontier": (SpeculativeTree(DynamicTree(5, 3, 2, frontier=4)), recursive_rejection),
    "eagle": (Eagle(_DYNAMIC), traversal),
    "eagle, shared noise": (EagleSharedNoise(_DYNAMIC), shared_noise),
    "eagle, top-k": (EagleTopK(_DYNAMIC), recursive_rejection),
    "medusa": (Medusa(_DYNAMIC), recursive_rejection),
    "medusa, shared noise": (SharedMedusa(_DYNAMIC), shared_noise),
    "layer-skip": (LayerSkip(3), speculative_sampling),
    "lookup": (Lookup(3), speculative_sampling),
    "recycle": (Recycle(4, top_k=9), speculative_sampling),
}
_RELAXED = {
    **{f"chain, {name}": (MixtureJacobi(6, "maximal"), rule) for name, rule in RELAXED_RULES.items()},
    **{f"draft model, {name}": (Speculative(3), rule) for name, rule in RELAXED_RULES.items()},
    **{f"tree, {name}": (SpeculativeTree(DynamicTree(6, 3, 2)), rule) for name, rule in TREE_RULES.items()},
    **{f"dynamic tree, {name}": (Eagle(_DYNAMIC), rule) for name, rule in TREE_RULES.items()},
    "local repair": (Jacobi(6, "from-verdict", "low-res"), PooledRule(1, 0.4, 1)),
    "wavefront": (Wavefront(12, initial="low-res", reach=2), WavefrontRule()),
}

PRESETS_OF_TOKENS = {preset.name: preset for preset in list_methods("next-token")}
RELAXED = {name: Accelerator(drafter=drafter, acceptance=rule) for name, (drafter, rule) in _RELAXED.items()}
METHODS = {
    **PRESETS_OF_TOKENS,
    **{name: Accelerator(drafter=drafter, acceptance=rule) for name, (drafter, rule) in _EXACT.items()},
    **RELAXED,
}


def generate(method: Accelerator, images: int = 3, model: TableModel | None = None, **options):
    sampling = options.pop("sampling", Sampling(0.9, top_p=0.95))
    condition = torch.arange(images) % 2
    return decode(model or table_model(), condition, torch.arange(50, 50 + images), method, sampling, **options)


def codebook(vocab: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(vocab, 4, generator=torch.Generator().manual_seed(seed))


def bind_rule(rule: RelaxedRule, vocab: int) -> RelaxedRule:
    model = TableModel(vocab=vocab, tokens=4)
    model.codebook = codebook(vocab)
    return rule.bind(model)


def random_probs(count: int, vocab: int, zeros: bool) -> torch.Tensor:
    """float64 `[count, 2, vocab]`, with zeros as filters leave them or without."""
    generator = torch.Generator().manual_seed(count + vocab)
    probs = torch.rand(count, 2, vocab, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        probs[:, :, ::3] *= torch.rand(count, 2, 1, generator=generator, dtype=torch.float64) > 0.5
        probs[:, :, 1] += 1e-3
    return probs / probs.sum(-1, keepdim=True)
