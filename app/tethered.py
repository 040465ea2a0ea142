"""python -m app.tethered PARENT MODULE: become `python -m MODULE`, and get SIGTERM when the parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # outlives the exec below
        if os.getppid() != parent:
            sys.exit(f"{module}: the parent is gone already")
    os.execv(sys.executable, [sys.executable, "-m", module])  # noqa: S606 - the module is named by our own code


if __name__ == "__main__":
    main()
