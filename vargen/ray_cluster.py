"""The Ray cluster that actors of an evaluation and replicas of a service run on."""

from __future__ import annotations

import os
from typing import Any

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # no usage statistics; logs go to files only
_ATTEMPTS = 3
_ADDRESS = "RAY_ADDRESS"  # of a cluster, by Ray's own convention


def join_or_start_cluster(num_cpus: int, address: str | None = None) -> None:
    """Join the cluster at `address` or that of RAY_ADDRESS; without either, start one of `num_cpus` cores on this machine.

    Its processes listen on all interfaces, and by default take only clients with the token in this user's home folder.
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
