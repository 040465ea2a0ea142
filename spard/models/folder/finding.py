"""What a look at a base model's folder finds, each as one sentence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about a folder: `code` is its kind, `sentence` what it is and what to do, without a final stop.

    A fault keeps the folder from being a base model; any other finding is something that its provider should know.
    """

    code: str
    sentence: str
    is_fault: bool = True


class FolderFault(Exception):
    """A fault after which the rest of the folder cannot be looked at."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.finding = Finding(code, sentence)


def note(code: str, sentence: str) -> Finding:
    """Return a finding that refuses nothing."""
    return Finding(code, sentence, is_fault=False)
