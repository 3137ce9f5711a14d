"""Drafters trained at tiny size: they learn, and a run killed at any moment ends with the weights of an unbroken one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline
from tiny_training import Killed, check_resumes

from vargen.assets import packaged_model_path
from vargen.decoding import (
    Accelerator,
    DynamicTree,
    Eagle,
    Medusa,
    Sampling,
    decode,
)
from vargen.decoding.experimental import recursive_rejection
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.training import generated_images as drafter_data
from vargen.training import heads as drafter
from vargen.training.generated_images import GeneratedImages, select_prompt_source
from vargen.training.heads import HeadConfig
from vargen.training.loop import Schedule, load_config

NETWORKS = {"eagle": EagleDrafter, "medusa": MedusaDrafter}


def recipe(kind: str, **changes) -> HeadConfig:
    model = {"n_head": 2, "multiple_of": 32, "above": True} if kind == "eagle" else {"heads": 3, "blocks": 1}
    base = {
        "schedule": Schedule(steps=8, learning_rate=3e-3, warmup_steps=2), "num_images": 24, "validation_images": 8,
        "generation_batch_size": 8,
        "batch_size": 4, "sampling": {"guidance_scale": 2.0, "top_k": 20}, "evaluate_every": 4, "checkpoint_every": 3,
    }  # fmt: skip
    return HeadConfig(model=model, **{**base, **changes})


def train(kind: str, folder: Path, pipe: LlamaGenPipeline | None = None, **changes) -> dict[str, float]:
    pipe = pipe or class_pipeline()
    return drafter.train_head(kind, recipe(kind, **changes), pipe, select_prompt_source(pipe, 24, None), folder)


def weights(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    return NETWORKS[kind].from_pretrained(folder / "drafter").state_dict()


@pytest.mark.parametrize("kind", NETWORKS)
def test_it_learns_what_drafts_are_verified_by(kind: str, tmp_path: Path) -> None:
    """The overlap on held-out pictures grows, and is the share of drafts that the exact rule accepts."""
    pipe = class_pipeline()
    frozen = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    early = train(kind, tmp_path / "early", pipe, schedule=Schedule(steps=1, learning_rate=0.0))
    schedule = Schedule(steps=60, learning_rate=1e-2, warmup_steps=5)
    late = train(kind, tmp_path / "late", pipe, schedule=schedule, num_images=72, batch_size=16)
    assert all(torch.equal(value, frozen[name]) for name, value in pipe.transformer.state_dict().items())
    assert late["acceptance_1"] > early["acceptance_1"] + 0.05 and late["acceptance_3"] > early["acceptance_3"] + 0.02
    assert 1 < late["tokens_per_pass"] <= 5 and late["acceptance_1"] <= 1

    pipe.load_drafter(tmp_path / "late" / "drafter")
    method = Accelerator("one", (Eagle if kind == "eagle" else Medusa)(DynamicTree(1, 1, 1)), recursive_rejection)
    condition, _ = pipe.encode_condition(class_labels=[number % 10 for number in range(64)])
    stats = decode(pipe.decoding_model(2.0), condition, torch.arange(64), method, Sampling(top_k=20)).stats
    tested = sum(stats.committed_histogram[1:]) - 64
    assert stats.committed_histogram[2] / tested == pytest.approx(late["acceptance_1"], abs=0.1)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_killed_run_resumes_to_the_same_weights(kind: str, tmp_path: Path) -> None:
    check_resumes(lambda folder: train(kind, folder), tmp_path, 5, "drafter")


def test_generation_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch) -> None:
    pipe = class_pipeline()
    whole = GeneratedImages(tmp_path / "whole", pipe, select_prompt_source(pipe, 24, None), recipe("eagle"))
    whole.generate_missing()
    generated, generate = [], GeneratedImages._generate_batch

    def mortal(store, numbers):
        if len(generated) == 2:
            generated.append("killed")
            raise Killed
        generated.append(numbers)
        generate(store, numbers)

    monkeypatch.setattr(GeneratedImages, "_generate_batch", mortal)
    for _ in range(2):
        store = GeneratedImages(tmp_path / "killed", pipe, select_prompt_source(pipe, 24, None), recipe("eagle"))
        try:
            store.generate_missing()
        except Killed:
            continue
    assert len(generated) == 4 and np.array_equal(store.tokens, whole.tokens) and store.tokens.any(axis=1).all()


def test_images_are_those_of_the_target_at_its_guidance_and_sampling(tmp_path: Path) -> None:
    pipe = class_pipeline()
    store = GeneratedImages(tmp_path, pipe, select_prompt_source(pipe, 24, None), recipe("eagle", temperature_one_fraction=0.5))
    store.generate_missing()
    assert [store.uses_temperature_one(number) for number in (0, 7, 8, 15, 16)] == [False, False, True, True, False]
    condition, model = store.condition([8, 9]), pipe.decoding_model(2.0)
    again = decode(model, condition, torch.tensor([8, 9]), "ar", Sampling(top_k=20)).tokens
    assert np.array_equal(store.tokens[8:10], again.numpy())


def test_images_of_another_target_or_sampling_are_refused(tmp_path: Path) -> None:
    train("eagle", tmp_path / "run")
    other = class_pipeline(n_layer=1)
    shared = tmp_path / "run" / "generated"
    for pipe, changes in ((other, {}), (class_pipeline(), {"sampling": {"guidance_scale": 3.0}})):
        arguments = recipe("medusa", **changes), pipe, select_prompt_source(pipe, 24, None), tmp_path / "new", shared
        with pytest.raises(ValueError, match="contains images of"):
            drafter.train_head("medusa", *arguments)
    rejects(lambda: train("eagle", tmp_path / "run", other), "settings")


def test_kinds_share_their_images(tmp_path: Path, monkeypatch) -> None:
    train("eagle", tmp_path / "run")
    monkeypatch.setattr(drafter_data, "decode", None)
    pipe = class_pipeline()
    store = GeneratedImages(tmp_path / "run" / "generated", pipe, select_prompt_source(pipe, 24, None), recipe("medusa"))
    store.generate_missing()
    assert store.tokens.any()


def test_without_guidance_one_half_is_trained(tmp_path: Path) -> None:
    figures = train("eagle", tmp_path, sampling={"guidance_scale": 1.0})
    assert 0 < figures["acceptance_1"] <= 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"validation_images": 24}, "validation_images"),
        ({"temperature_one_fraction": 1.5}, "temperature_one_fraction"),
        ({"step_weights": []}, "step_weights"),
        ({"step_weights": [0.0, 0.0]}, "step_weights"),
        ({"unroll_steps": 0}, "unroll_steps"),
    ],
)
def test_bad_recipes_are_refused(changes, match: str) -> None:
    rejects(lambda: recipe("eagle", **changes), match)


def test_settings_that_a_drafter_lacks_are_refused(tmp_path: Path) -> None:
    config = class_pipeline().transformer.config
    rejects(lambda: drafter.build_head("hydra", config, {}), "kind")
    rejects(lambda: drafter.build_head("medusa", config, {"above": True}), "above")


@pytest.mark.parametrize("kind", NETWORKS)
def test_packaged_recipes_fit_the_packaged_model_in_four_mebibytes(kind: str) -> None:
    given = load_config(kind, HeadConfig)
    target = json.loads((packaged_model_path("emoji") / "transformer" / "config.json").read_text())
    network = drafter.build_head(kind, target, given.model)
    assert 2 * sum(value.numel() for value in network.state_dict().values()) < 4 * 2**20
    assert dataclasses.replace(given, num_images=128).validation_images == 64
