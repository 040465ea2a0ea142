"""What may break into an attempt and is no error of the job."""

from __future__ import annotations

from sqlalchemy.exc import InterfaceError, OperationalError, TimeoutError

DATABASE_AWAY = (InterfaceError, OperationalError, TimeoutError)  # worth another try


class Lost(Exception):
    """The lease is somebody else's, or may be soon: end, and write nothing."""


class Cancelled(Exception):
    """The customer wants no more of it."""


class Overdue(Exception):
    """The job's time is over."""


class Stopping(Exception):
    """The worker is to stop, or the customer wants the job to pause."""


class Stalled(Exception):
    """The child lives but does nothing."""
