"""Keeps libraries' own messages out of a command's output."""

from __future__ import annotations

from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def hide_progress_bars() -> None:
    """Disable the progress bars of transformers and of the hub's client."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def hide_notes() -> None:
    """Let transformers print only errors, and disable progress bars."""
    hide_progress_bars()
    set_verbosity_error()  # type: ignore[no-untyped-call]
