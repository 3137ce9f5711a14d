"""The Ray cluster that actors of an evaluation and replicas of a service run on."""

from __future__ import annotations

import os
from typing import Any

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # no usage statistics; logs go to files only
_ATTEMPTS = 3
_ADDRESS = "RAY_ADDRESS"  # of a cluster, by Ray's own convention


def join_or_start_cluster(num_cpus: int, address: str | None = None) -> None:
    """Join the cluster at `address` or that of RAY_ADDRESS; without either, start one on this machine.

    Ray's processes listen on all of its interfaces. By default, from 2.60 on, they take only clients with the token that
    Ray writes to the home folder of the user that started them.

    Args:
        num_cpus: cores of a cluster that is started.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address or os.environ.get(_ADDRESS):
        ray.init(address=address, **quiet)
        return
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray gives a node 30 s to start, too short on a busy machine, and has no type for it
            if attempt == _ATTEMPTS or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
