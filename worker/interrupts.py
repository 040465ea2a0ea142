"""Exceptions that end an attempt without an error of the job."""

from __future__ import annotations

from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

DATABASE_AWAY = (InterfaceError, OperationalError, TimeoutError)  # worth another try


class Lost(Exception):
    """Another worker has the lease, or may have it soon: end the attempt and write nothing."""


class Cancelled(Exception):
    """The customer has cancelled the job."""


class Overdue(Exception):
    """The job has exceeded its maximum run time."""


class Stopping(Exception):
    """The worker has to stop, or the customer has paused the job."""


class Stalled(Exception):
    """The child still runs but has sent no message for too long."""
