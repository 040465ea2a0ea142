"""What may break into an attempt, none of it an error of the job."""

from __future__ import annotations


class Lost(Exception):
    """The lease is somebody else's, or may be soon: end, and write nothing."""


class Cancelled(Exception):
    """The customer wants no more of it."""


class Stopping(Exception):
    """The worker is to stop."""


class Stalled(Exception):
    """The child lives but does nothing."""
