"""The projected speedup of drafting: near the published ones, and right where it can be computed by hand."""

import pytest

from vargen.models.causal_video_geometry import VideoGeometry
from vargen.models.video_costs import WAN_1_3B, WAN_14B, project_speedup

OFFICIAL = VideoGeometry()


def test_projections_are_those_of_the_page(repo_root):
    page = (repo_root / "docs" / "models.md").read_text("utf-8")
    pairs = {
        "14B, drafts by the 1.3B": (WAN_14B, WAN_1_3B, {}),
        "1.3B of 4 steps, drafts of 2": (WAN_1_3B, WAN_1_3B, {"draft_steps": 2}),
        "1.3B of 4 steps, drafts of 1": (WAN_1_3B, WAN_1_3B, {"draft_steps": 1}),
        "the same, one network for both, drafts of 2": (WAN_1_3B, WAN_1_3B, {"draft_steps": 2, "shares_cache": True}),
        "the same, one network for both, drafts of 1": (WAN_1_3B, WAN_1_3B, {"draft_steps": 1, "shares_cache": True}),
    }
    for name, (target, draft, options) in pairs.items():
        found = [project_speedup(target, draft, OFFICIAL, share, **options) for share in (0.5, 0.7, 0.9)]
        assert f"| {name} | {' | '.join(f'{each:.2f}' for each in found)} |" in page, found


def test_limits_by_hand():
    free = type("Free", (), {"dim": 0, "ffn_dim": 0, "num_layers": 0})
    flat = VideoGeometry(height=2, width=2)  # twelve tokens or fewer: attention hardly counts
    everything = project_speedup(WAN_14B, free, flat, 1.0, blocks=2, text=0)
    assert everything == pytest.approx((4 + 1 + 4) / (4 + 1), rel=0.01), "block 0 and one cache update remain"
    assert project_speedup(WAN_14B, free, flat, 0.0) == pytest.approx(1)
    assert project_speedup(WAN_14B, WAN_14B, flat, 0.0) == pytest.approx(0.5, abs=0.06)
    once = project_speedup(WAN_14B, WAN_14B, flat, 1.0, draft_steps=1, blocks=2, text=0, shares_cache=True)
    assert once == pytest.approx((4 + 1 + 4) / (4 + 1 + 1), rel=0.01), "one update of one cache"
