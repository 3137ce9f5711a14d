"""The router of video drafts: trained on pairs, calibrated, resumed, used by sdvg-learned, and refused for another drafter."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_families import brightness
from typer.testing import CliRunner

from vargen.cli.main import app
from vargen.decoding import PRESETS, DraftView, LearnedRouting, VideoMethod
from vargen.models.causal_video.decoding import BlockRouter, describe_draft
from vargen.pipelines.loading import open_pipeline
from vargen.scoring.frames import FrameScorer
from vargen.training import router as training
from vargen.training.router import RouterConfig, RouterPairs, fit_router, later_gains, train_router

PROMPTS = ["a red apple", "a blue car", "a happy dog"]
CONFIG = RouterConfig(blocks=3, every=1)


@pytest.fixture
def pipe(video_model, monkeypatch):
    opened = open_pipeline(video_model)
    monkeypatch.setattr(type(opened), "resolve_frame_scorer", lambda self, scorer=None: FrameScorer(brightness))
    return opened


@pytest.fixture(scope="module")
def run(video_model, tmp_path_factory):
    opened = open_pipeline(video_model)
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(opened), "resolve_frame_scorer", lambda self, scorer=None: FrameScorer(brightness))
        return place, train_router(CONFIG, opened, PROMPTS, place)


def invented_pairs(pipe, prompt, seed, config) -> RouterPairs:
    random = np.random.default_rng([seed, len(prompt)])
    return RouterPairs(random.normal(size=(3, 136)).astype(np.float32), random.normal(size=3).astype(np.float32))


def weights(folder) -> dict[str, torch.Tensor]:
    return BlockRouter.from_pretrained(folder / "router").state_dict()


def test_statistics_are_of_each_draft_alone_and_finite_after_an_image():
    draft, previous, first = torch.randn(3, 3, 2, 4, 2, 2).unbind(1)
    together = describe_draft(draft, previous, first, 5)
    assert together.shape == (3, BlockRouter().mean.numel()) and (together[:, -1] == 5).all()
    alone = describe_draft(draft[1:2], previous[1:2], first[1:2], 5)
    torch.testing.assert_close(together[1:2], alone)
    assert describe_draft(draft, previous[:, :1], first[:, :1], 1).isfinite().all()
    blurred = describe_draft(draft.mean((-1, -2), keepdim=True).expand_as(draft), previous, first, 5)
    sharpness = together.shape[1] - 6  # relative to the first block
    assert (blurred[:, sharpness] < together[:, sharpness] - 5).all()


def test_a_fit_finds_what_determines_the_gain_and_a_share_is_a_share():
    random = np.random.default_rng(0)
    router = BlockRouter()
    pairs = []
    for _ in range(12):
        statistics = random.normal(size=(40, router.mean.numel())).astype(np.float32)
        pairs.append(RouterPairs(statistics, 2 * statistics[:, 3] + random.normal(size=40).astype(np.float32) * 0.2))
    metrics = fit_router(router, pairs, 0.01)
    assert metrics["correlation"] > 0.95 and metrics["pairs"] == 480
    gain = router.predict_gain(torch.from_numpy(np.concatenate([each.statistics for each in pairs])))
    rank = torch.searchsorted(router.ranks, gain) / 100
    assert abs(float((rank <= 0.7).float().mean()) - 0.7) < 0.05
    with pytest.raises(ValueError, match="prompts"):
        fit_router(router, pairs[:1], 0.01)


def test_a_killed_training_continues_to_the_same_router(tmp_path, pipe, monkeypatch):
    made = []

    def generate(pipe, prompt, seed, config):
        if len(made) == 2 and "killed" not in made:
            made.append("killed")
            raise KeyboardInterrupt
        made.append(prompt)
        return invented_pairs(pipe, prompt, seed, config)

    monkeypatch.setattr(training, "generate_pairs", generate)
    with pytest.raises(KeyboardInterrupt):
        train_router(CONFIG, pipe, PROMPTS, tmp_path / "part")
    assert not (tmp_path / "part" / "router").exists()
    metrics = train_router(CONFIG, pipe, PROMPTS, tmp_path / "part")
    assert made == [*PROMPTS[:2], "killed", PROMPTS[2]]
    assert train_router(CONFIG, pipe, PROMPTS, tmp_path / "whole") == metrics
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "part")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_it_routes_is_saved_with_the_model_and_refused_for_another_drafter(tmp_path, pipe, run):
    rejects(lambda: pipe("a red apple", accelerator="sdvg-learned"), "router")
    assert run[1]["pairs"] == 3 * (1 + 2) and pipe.load_drafter(run[0]) == "router"
    accepted = []
    for share in (0.0, 0.5, 1.0):
        method = replace(PRESETS["sdvg-learned"], policy=LearnedRouting(share))
        stats = pipe("a red apple", accelerator=method, num_blocks=6, generator=torch.Generator().manual_seed(3)).stats
        accepted.append(sum(source == "draft" for source in stats.sources))
        assert all(0 <= record.score <= 1 for record in stats.blocks[1:]) and stats.blocks[0].score is None
    assert accepted[0] <= accepted[1] <= accepted[2] == 5
    pipe.save_pretrained(tmp_path / "model")
    again = open_pipeline(tmp_path / "model")
    assert torch.equal(again.router.gain.weight, pipe.router.gain.weight)
    assert "decode" in stats.seconds_by_part and all(record.scores == [] for record in stats.blocks)
    with torch.no_grad():
        pipe.draft_transformer.head.head.weight.add_(0.5)
    rejects(lambda: pipe("a red apple", accelerator="sdvg-learned"), "vargen train router")
    rejects(lambda: pipe("a red apple", accelerator=VideoMethod(policy=LearnedRouting(), exit_step=2)), "exit_step")


def test_early_exits_are_routed_without_a_small_model(tmp_path, pipe):
    pipe.register_modules(draft_transformer=None)
    rejects(lambda: train_router(CONFIG, pipe, PROMPTS, tmp_path), "draft_transformer")
    rejects(lambda: train_router(RouterConfig(exit_step=4), pipe, PROMPTS, tmp_path), "exit_step")
    train_router(replace(CONFIG, exit_step=2, blocks=2), pipe, PROMPTS[:2], tmp_path)
    pipe.load_drafter(tmp_path)
    method = VideoMethod(policy=LearnedRouting(1.0), exit_step=2)
    stats = pipe("a red apple", accelerator=method, num_blocks=3).stats
    assert stats.sources == ("target", "draft", "draft") and set(stats.passes) == {"target"}


def test_later_gains_are_means_over_all_continuations():
    random, blocks = np.random.default_rng(0), 4
    target, draft = ([random.normal(size=2 ** max(0, n - 1)) for n in range(blocks)] for _ in range(2))

    def rest(block, history):
        """The mean sum of the scores of later blocks."""
        sums = []
        for choices in product((0, 1), repeat=blocks - 1 - block):
            row, total = history, 0.0
            for n, choice in enumerate(choices, block + 1):
                total += (target, draft)[choice][n][row]
                row = 2 * row + choice
            sums.append(total)
        return np.mean(sums)

    for block, gains in enumerate(later_gains(target, draft), 1):
        for row, gain in enumerate(gains):
            own, other = target[block][row] + rest(block, 2 * row), draft[block][row] + rest(block, 2 * row + 1)
            assert gain == pytest.approx(own - other)


def test_bad_settings_are_named():
    for seeds in ((), (3, -1)):
        with pytest.raises(ValueError, match="seeds"):
            RouterConfig(seeds=seeds)
    for bad in (-0.1, 1.5, "much"):
        with pytest.raises(ValueError, match="share"):
            LearnedRouting(bad)
    with pytest.raises(ValueError, match="blocks"):
        RouterConfig(blocks=1)
    view = DraftView(1, *torch.zeros(3, 1, 2, 4, 2, 2))
    assert 0 <= float(BlockRouter()(view.latents, view.previous, view.first, view.number)[0]) <= 1


def test_the_command_trains_a_router(tmp_path, video_model, monkeypatch):
    monkeypatch.setattr(training, "generate_pairs", invented_pairs)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["train", "router", "--model", str(video_model), "--prompt-file", str(tmp_path / "prompts.txt"), "--blocks", "2"]
    rounds = ["--seed", "0", "--seed", "50"]
    done = CliRunner().invoke(app, [*words, *rounds, "--output", str(tmp_path / "run"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["pairs"] == 2 * 9 and (tmp_path / "run" / "router" / "config.json").is_file()
