"""The command `spard`: subcommands of this library, and those that installed distributions add by entry points."""

from __future__ import annotations

from spard.commands.main import main

__all__ = ["main"]
