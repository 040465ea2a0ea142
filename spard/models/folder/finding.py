"""The findings of a check of a base model's folder, each one sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a folder: `code` is its kind; `sentence` names problem and remedy, without a final period.

    A fault disqualifies the folder as a base model; any other finding is information for the provider.
    """

    code: str
    sentence: str
    is_fault: bool = True


class FolderFault(Exception):
    """A fault that makes further checks of the folder impossible."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.finding = Finding(code, sentence)


def note(code: str, sentence: str) -> Finding:
    """Return a finding that disqualifies nothing."""
    return Finding(code, sentence, is_fault=False)
