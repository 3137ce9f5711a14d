"""`GET /metrics`: what the service does, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vargen.serving.tasks import GenerationStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class _StatsCollector(Collector):
    """Reads the counts of what generates when they are asked for."""

    def __init__(self, read: Callable[[], GenerationStats]):
        self.read = read

    def collect(self) -> Iterator[Metric]:
        stats = self.read()
        yield GaugeMetricFamily("vargen_queue_length", "Images or videos that wait.", stats.num_waiting)
        yield GaugeMetricFamily("vargen_active", "Images or videos that are being generated.", stats.num_active)
        yield GaugeMetricFamily("vargen_images_per_second", "Images per second in the last minute.", stats.images_per_second)
        yield GaugeMetricFamily(
            "vargen_tokens_per_pass", "Tokens that a pass commits to an image.", stats.tokens / max(stats.passes, 1)
        )  # fmt: skip
        yield CounterMetricFamily("vargen_images", "Finished images.", stats.images)
        yield CounterMetricFamily("vargen_tokens", "Tokens of finished images.", stats.tokens)
        yield CounterMetricFamily("vargen_passes", "Passes that finished images took part in, summed.", stats.passes)


class Metrics:
    """The metrics of one application.

    Args:
        read_stats: returns the counts of what generates.
        endpoints: paths that are counted by name; others are counted together.
    """

    def __init__(self, read_stats: Callable[[], GenerationStats], endpoints: tuple[str, ...]):
        self._registry, self._endpoints = CollectorRegistry(), endpoints
        self._registry.register(_StatsCollector(read_stats))
        labels, registry = ["endpoint"], self._registry
        self._requests = Counter("vargen_requests", "Answered requests.", [*labels, "status"], registry=registry)
        self._seconds = Histogram(
            "vargen_request_seconds", "Seconds to the end of the answer.", labels, buckets=_BUCKETS, registry=registry
        )  # fmt: skip

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def record(self, path: str, status: int, seconds: float) -> None:
        """Count a request. The status is 499 if the client went away before the answer."""
        endpoint = path if path in self._endpoints else "other"
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)


class MetricsMiddleware:
    """Counts each request when its answer has been sent."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status: Any = 499
        started = time.monotonic()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            self.metrics.record(scope["path"], status, time.monotonic() - started)
