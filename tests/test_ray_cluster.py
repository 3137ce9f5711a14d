"""A cluster is started again if its node needed too long, and for no other error."""

from __future__ import annotations

from typing import Any

import pytest

from vargen.ray_cluster import join_or_start_cluster

ray = pytest.importorskip("ray")
SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.mark.parametrize(("errors", "starts"), [((), 1), ((SLOW, SLOW), 3), ((SLOW,) * 3, 3), ((SLOW, "no such option"), 2)])
def test_only_a_node_that_starts_slowly_is_started_again(
    errors: tuple[str, ...], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, calls = list(errors), []

    def init(**options: Any) -> None:
        calls.append(options)
        if left:
            raise Exception(left.pop(0))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    if len(errors) < starts:
        join_or_start_cluster(3)
    else:
        with pytest.raises(Exception, match=errors[-1]):
            join_or_start_cluster(3)
    assert len(calls) == starts
    assert all(call["address"] == "local" and call["num_cpus"] == 3 for call in calls)
