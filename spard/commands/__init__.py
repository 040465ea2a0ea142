"""The command `spard`: this library's subcommands, and those that installed distributions add by entry points."""

from __future__ import annotations

from spard.commands.main import main

__all__ = ["main"]
