"""Logging for every process: lines on standard error, each with the ids of its request and job.

SPARD_LOG_FORMAT=json writes each line as a JSON object, for log collectors.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

Format = Literal["text", "json"]
_ORDER = ["timestamp", "level", "event", "request_id", "job_id"]


def set_up(format: Format = "text") -> None:
    """Set up logging; each process calls this once, before it logs."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _renderer(format),
            ],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # uvicorn installs handlers of its own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # our own request log has more fields


def quiet(*names: str) -> None:
    """Log only warnings and errors of these loggers."""
    for name in names:
        logging.getLogger(name).setLevel(logging.WARNING)


def _renderer(format: Format) -> Processor:
    if format == "json":
        return structlog.processors.JSONRenderer(sort_keys=True)
    return structlog.processors.KeyValueRenderer(key_order=_ORDER, drop_missing=True)
