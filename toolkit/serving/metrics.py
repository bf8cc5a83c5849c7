"""Prometheus metrics of a server."""

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from arbordraft.decoding.engine import Engine
from arbordraft.decoding.streams import Event

_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ANSWERS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Metrics of one server, in their own registry.

    Args:
        engine: engine whose queue and samples are reported.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"arbordraft_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"arbordraft_{name}_seconds", text, buckets=buckets, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"arbordraft_{name}", text, registry=self.registry)

        gauge("waiting", "Answers that are still to be admitted").set_function(lambda: engine.waiting)
        gauge("living", "Answers that are being decoded").set_function(lambda: engine.running)
        gauge("tau", "Tokens per target forward of an answer since the start").set_function(self._tau)
        self.requests = counter("requests", "Requests that were finished, cancelled, failed or refused", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.tokens = counter("tokens", "Tokens of answers")
        self.forwards = counter("forwards", "Target forwards, counted for every answer that took part")
        self.rows = counter("rows", "Rows of target forwards: drafted tokens and the committed token before them")
        self.drafted = counter("drafted_tokens", "Drafted tokens")
        self.accepted = counter("accepted_tokens", "Drafted tokens that were accepted")
        self.first = histogram("first_token", "From a request to its first token", _WAITS)
        self.between = histogram("between_tokens", "Between two arrivals of an answer's tokens", _WAITS)
        self.duration = histogram("request", "From a request to its end, if it was finished", _ANSWERS)
        self._totals = [0, 0]

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return bytes(generate_latest(self.registry))

    def _tau(self) -> float:
        tokens, forwards = self._totals
        return tokens / max(1, forwards)

    def step(self, event: Event) -> None:
        """Counts a step of an answer."""
        assert event.tree is not None
        assert event.verdict is not None
        self.tokens.inc(len(event.tokens))
        self.forwards.inc()
        self.rows.inc(len(event.tree.rows))
        self.drafted.inc(len(event.tree.rows) - 1)
        self.accepted.inc(min(len(event.verdict.path) - 1, len(event.tokens)))
        self._totals = [self._totals[0] + len(event.tokens), self._totals[1] + 1]


class Watch:
    """Records the metrics of one request.

    Args:
        metrics: metrics of the server.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._start = metrics, perf_counter()
        self._last: dict[int, float] = {}

    def taken(self, prompt: int) -> None:
        """Counts the request's prompt tokens."""
        self._metrics.prompt_tokens.inc(prompt)

    def observe(self, event: Event) -> None:
        """Counts an event of the engine."""
        if event.tree is None:
            return
        now = perf_counter()
        if not self._last:
            self._metrics.first.observe(now - self._start)
        if event.answer in self._last:
            self._metrics.between.observe(now - self._last[event.answer])
        self._last[event.answer] = now
        self._metrics.step(event)

    def ended(self, outcome: str) -> None:
        """Counts the outcome; times a finished request."""
        self._metrics.requests.labels(outcome).inc()
        if outcome == "finished":
            self._metrics.duration.observe(perf_counter() - self._start)
