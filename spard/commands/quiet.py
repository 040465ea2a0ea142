"""What libraries print of themselves, kept from a command's output."""

from __future__ import annotations

from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def hide_progress_bars() -> None:
    """Have transformers and the hub's client draw no progress bars."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def hide_notes() -> None:
    """Have transformers say nothing but errors, and draw no progress bars."""
    hide_progress_bars()
    set_verbosity_error()  # type: ignore[no-untyped-call]
