"""What Prometheus reads of a worker, on a port of its own: attempts and stages, their seconds, lost leases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

from app.metrics import MEDIA_TYPE, head

LOST = "lost"


class Figures:
    """Counted since the worker started; for all its threads."""

    def __init__(self) -> None:
        self.is_fit = True  # its GPU computes, as far as is known
        self._lock = Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)

    def note_attempt(self, outcome: str, seconds: float) -> None:
        """The job's status when we left it, or `lost` when somebody else had it."""
        self._note(("spard_attempt", "outcome", outcome), seconds)

    def note_stage(self, stage: str, seconds: float) -> None:
        self._note(("spard_stage", "stage", stage), seconds)

    def lines(self) -> Iterator[str]:
        """In Prometheus's text format; a summary of count and sum for each outcome and each stage."""
        with self._lock:
            counts, seconds = dict(self._counts), dict(self._seconds)
        refused = counts.get(("spard_attempt", "outcome", LOST), 0)
        yield from head("spard_lease_refusals_total", "counter", "Attempts whose lease was somebody else's.")
        yield f"spard_lease_refusals_total {refused}"
        yield from head("spard_worker_fit", "gauge", "1 while the worker takes jobs, 0 while its GPU does not work.")
        yield f"spard_worker_fit {int(self.is_fit)}"
        for family, help in (("spard_attempt", "Attempts by how they ended."), ("spard_stage", "Stages of attempts.")):
            yield from head(f"{family}_seconds", "summary", help)
            for (name, label, value), count in sorted(counts.items()):
                if name == family:
                    labels = f'{{{label}="{value}"}}'
                    yield f"{family}_seconds_count{labels} {count}"
                    yield f"{family}_seconds_sum{labels} {seconds[name, label, value]:.3f}"

    def _note(self, key: tuple[str, str, str], seconds: float) -> None:
        with self._lock:
            self._counts[key] += 1
            self._seconds[key] += seconds


@contextmanager
def served(figures: Figures, port: int | None) -> Iterator[None]:
    """`/metrics` on a port while the block runs; it needs no key: keep it within your network."""
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = ("\n".join(figures.lines()) + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", MEDIA_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Asked every few seconds, by a machine: not worth a line."""

    with ThreadingHTTPServer(("", port), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
