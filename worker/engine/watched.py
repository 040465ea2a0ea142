"""Watch the folder of an engine's base model for changes.

Weights on a CPU are memory-mapped from their files, so a write to a file changes the model that answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spard.digests import file_identities, folder_digest

_EVERY_S = 1.0


class Watched:
    """A watched model folder; create it before the model is read, so that changes during the read are noticed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._seen, self._looked_at = file_identities(folder), clock()

    def look_next_time(self) -> None:
        """Make the next `has_changed` check the files, even if the last check was less than a second ago."""
        self._looked_at = -_EVERY_S

    def has_changed(self, digest: str) -> bool:
        """Return True if the files no longer have `digest`, the digest of the model as it was read.

        Sizes, inodes and times are compared at most once a second; only if they differ are the files hashed again, so
        files that were merely touched or copied do not count as changed.
        """
        if self._clock() - self._looked_at < _EVERY_S:
            return False
        self._looked_at = self._clock()
        try:
            found = file_identities(self._folder)
            if found == self._seen:
                return False
            is_same = folder_digest(self._folder) == digest
        except OSError:  # a file was removed
            return True
        if is_same:
            self._seen = found
        return not is_same
