"""Whole pictures are measured in turns with the published loop; times are not judged here."""

import pytest
import torch
from tiny_models import tiny_multi_scale_vq, tiny_var

from vargen.evaluation.image_speed import measure_image_speed
from vargen.evaluation.networks import BenchmarkModel
from vargen.evaluation.speed import measure_baseline, measure_steps
from vargen.models.quantization import dequantize_network, quantize_network
from vargen.models.var import VARTransformer
from vargen.pipelines.var import VARPipeline


def benchmark_model(transformer: VARTransformer) -> BenchmarkModel:
    defaults = {"guidance_scale": 3.0, "top_k": None, "top_p": 1.0}
    return BenchmarkModel("tiny", VARPipeline(vqvae=tiny_multi_scale_vq(), transformer=transformer, defaults=defaults))


@pytest.fixture(scope="module")
def network() -> BenchmarkModel:
    return benchmark_model(tiny_var("class"))


def test_the_report_adds_up(network: BenchmarkModel) -> None:
    rounds: list[int] = []
    report = measure_image_speed(network, 2, rounds=2, progress=lambda done, total: rounds.append(done))
    assert rounds == [0, 1, 2] and (report.batch, report.rounds, report.threads) == (2, 2, torch.get_num_threads())
    assert report.speedup == pytest.approx(report.reference_token_milliseconds / report.token_milliseconds)
    whole, theirs = (
        report.token_milliseconds + report.pixel_milliseconds,
        report.reference_token_milliseconds + report.reference_pixel_milliseconds,
    )
    assert report.speedup_with_pixels == pytest.approx(theirs / whole)
    assert report.roofline_fraction == pytest.approx(report.roofline / report.token_milliseconds)
    assert report.roofline_fraction_with_pixels == pytest.approx(report.roofline_with_pixels / whole)
    assert 0 < report.roofline < report.roofline_with_pixels
    assert report.to_dict()["parameters"] == sum(p.numel() for p in network.transformer.parameters())
    for bad in ({"batch": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="batch and rounds must be at least 1"):
            measure_image_speed(network, **bad)


def test_the_opponent_has_weights_of_its_own_in_float32() -> None:
    network = benchmark_model(tiny_var("class").bfloat16())
    generate, pixels = network.published_sampler(2)
    assert pixels(generate()).shape == (2, 3, 8, 8)
    assert network.transformer.dtype == torch.bfloat16, "ours stays as it is"


def test_a_quantized_model_is_compared_with_its_weights_in_float32() -> None:
    network = benchmark_model(quantize_network(tiny_var("class")))
    copied, layer = dequantize_network(network.transformer), network.transformer.blocks[0].ffn.fc1
    assert copied.config.quantization is None and copied.dtype == torch.float32
    assert torch.equal(copied.blocks[0].ffn.fc1.weight, layer.weight * layer.weight_scale[:, None])
    report = measure_image_speed(network, rounds=1)
    assert report.dtype == "int8" and report.roofline > 0
    assert [case.tokens for case in measure_steps(network, [1, 16], [1], rounds=1).results] == [1, 16]


def test_other_measurements_know_scales(network: BenchmarkModel) -> None:
    report = measure_baseline(network, 2, seconds=0)
    assert report.runs == 1 and report.guidance_scale == 3.0
    steps = measure_steps(network, [1, 16], [1], rounds=1)
    assert [(case.batch, case.tokens) for case in steps.results] == [(1, 1), (1, 16)]
