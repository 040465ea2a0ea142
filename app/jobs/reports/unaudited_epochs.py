"""Describe the epochs whose checkpoints were not audited."""

from __future__ import annotations

from collections.abc import Sequence

from spard.release.report import CheckpointRecord


def sentence(checkpoints: Sequence[CheckpointRecord]) -> str:
    """Return a sentence, with a leading space, on epochs without an audit; empty if all have one."""
    epochs = [each.epoch for each in checkpoints if each.gate is None and not each.asr.n]
    if not epochs:
        return ""
    which = f"Epoch {epochs[0]} was" if len(epochs) == 1 else f"Epochs {_ranges(epochs)} were"
    return f" {which} not audited: a checkpoint is audited only where it is kept when the job ends."


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text with runs as ranges: "1 to 3, 5"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in groups)
