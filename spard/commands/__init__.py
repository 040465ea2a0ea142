"""The command `spard`: this library's subcommands, and more that installed distributions add by entry points."""

from __future__ import annotations

from spard.commands.main import main

__all__ = ["main"]
