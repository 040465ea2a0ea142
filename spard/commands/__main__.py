"""`python -m spard.commands`: the command `spard` where no script is installed."""

from __future__ import annotations

from spard.commands.main import main

if __name__ == "__main__":
    main()
