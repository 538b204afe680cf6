"""What Prometheus reads at /metrics."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from toolkit.serving.engine import Engine
from toolkit.serving.requests import Progress

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()

        def of(kind: Any, name: str, what: str, *labels: str, **how: Any) -> Any:
            return kind(f"toolkit_{name}", what, labels, registry=self.registry, **how)

        self.requests = of(Counter, "requests", "Requests that ended, by reason", "reason")
        self.refused = of(Counter, "refused", "Requests refused, by HTTP status", "status")
        self.tokens = of(Counter, "tokens", "Tokens read, found in the cache, written", "kind")
        self.first = of(Histogram, "first_token_seconds", "Arrival to first token", buckets=SECONDS)
        self.gap = of(Histogram, "per_token_seconds", "Mean gap between tokens", buckets=SECONDS)
        waiting = of(Gauge, "waiting", "Requests without a row")
        waiting.set_function(lambda: len(engine.progress) - engine.running)
        of(Gauge, "running", "Requests with a row").set_function(lambda: engine.running)
        if (pages := engine.pages) is not None:
            of(Gauge, "pages_available", "Pages that can be given away").set_function(
                lambda: pages.available
            )

    def ended(self, progress: Progress) -> None:
        """Count a request that has ended."""
        self.requests.labels(str(progress.reason)).inc()
        read = len(progress.request.prompt) - progress.shared
        counts = {"read": read, "shared": progress.shared, "written": len(progress.tokens)}
        if progress.times:
            for kind, count in counts.items():
                self.tokens.labels(kind).inc(count)
            self.first.observe(progress.first_token)
        if len(progress.times) > 1:
            self.gap.observe(progress.per_token)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
