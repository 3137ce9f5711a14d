"""VAR networks to measure: the opponent draws what is published, passes are real, and their work is counted right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_models import text_var_pipeline, tiny_multi_scale_vq, tiny_var

from vargen.bench.passes import (
    BenchmarkModel,
    find_pass_scales,
    official_sizes,
    open_benchmark_model,
    validate_benchmark_model,
)
from vargen.pipelines.var import VAR, VARPipeline


def network(condition: str = "class", **overrides: Any) -> BenchmarkModel:
    defaults = {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 20, "top_p": 0.9}
    parts = {"vqvae": tiny_multi_scale_vq(), "transformer": tiny_var(condition, **overrides)}
    return BenchmarkModel("tiny", VARPipeline(**parts, defaults=defaults))


def test_passes_stand_at_their_place_and_can_be_repeated() -> None:
    made = network()
    seen: list[tuple[int, int]] = []
    made.transformer.blocks[0].register_forward_pre_hook(
        lambda _, given: seen.append((given[0].shape[1], given[3].start)), prepend=True
    )
    passes = made.passes(2, [4, 16, 4])
    assert list(passes) == [4, 16]
    seen.clear()
    for run in passes.values():
        first, second = run(), run()
        assert torch.equal(first[0], second[0])
    assert seen == [(4, 1), (4, 1), (16, 14), (16, 14)]
    with pytest.raises(ValueError, match="a pass feeds whole scales, of 1, 4, 9, 16 tokens; got 3"):
        made.passes(1, [3])


def test_scales_of_a_pass() -> None:
    tokens = (1, 4, 9, 16, 25)
    expected = {1: (0, 0), 5: (0, 1), 14: (0, 2), 13: (1, 2), 25: (4, 4), 41: (3, 4)}
    assert {width: find_pass_scales(tokens, width) for width in expected} == expected


def test_a_packaged_model_by_name() -> None:
    assert "llamagen-b" in official_sizes()
    rejects(lambda: validate_benchmark_model("nothing"), "nothing")
    found = open_benchmark_model("emoji", torch.float32, torch.device("cpu"))
    assert (
        found.pipe.num_tokens == 256
        and found.pipe.default_sampling["guidance_scale"] == 1.25
        and found.pipe.text_encoder is None
    )


def test_networks_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "var-d16" in official_sizes()
    pipe = text_var_pipeline(draft=False)
    pipe.save_pretrained(tmp_path / "model")
    stored = open_benchmark_model(str(tmp_path / "model"), torch.float32, torch.device("cpu"))
    assert (
        stored.pipe.default_sampling["guidance_scale"] == 3.0
        and stored.pipe.num_tokens == 30
        and stored.pipe.baseline == "plain"
    )
    tiny = {"depth": 1, "dim": 32, "n_head": 1, "scales": (1, 2), "vocab_size": 64, "code_dim": 8}
    vqvae = dict(tiny_multi_scale_vq(scales=(1, 2)).config)
    size = {"transformer": tiny, "vqvae": {name: value for name, value in vqvae.items() if not name.startswith("_")}}
    monkeypatch.setitem(VAR.official_sizes, "var-d16", size)  # type: ignore[arg-type]
    random = open_benchmark_model("var-d16", torch.float32, torch.device("cpu"))
    assert random.transformer.head.weight.std() > 0.01
    assert json.dumps(dict(random.transformer.config.items()), default=str)
