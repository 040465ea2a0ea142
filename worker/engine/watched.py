"""The folder that an engine has read its base model from, looked at while it serves.

Weights on a CPU are mapped from their files: whatever is written into these is what answers from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from spard.digests import file_identities, folder_digest

_EVERY_S = 1.0


class Watched:
    """Make it before the model is read: a file that changes meanwhile is noticed, too."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._seen, self._looked_at = file_identities(folder), clock()

    def look_next_time(self) -> None:
        """Have the files looked at the next time, however short the last look is ago."""
        self._looked_at = -_EVERY_S

    def has_changed(self, digest: str) -> bool:
        """Tell whether the files are others than those of the digest, which is that of the model as it was read.

        Once a second sizes, inodes and times are compared; where these are others, the files are read again, so that
        one that was only touched or copied changes nothing.
        """
        if self._clock() - self._looked_at < _EVERY_S:
            return False
        self._looked_at = self._clock()
        try:
            found = file_identities(self._folder)
            if found == self._seen:
                return False
            is_same = folder_digest(self._folder) == digest
        except OSError:  # a file went between two looks
            return True
        if is_same:
            self._seen = found
        return not is_same
