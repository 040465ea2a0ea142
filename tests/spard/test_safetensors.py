"""Weights that lie about themselves: refused before memory is given to what they claim."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import pytest

from spard.errors import InvalidModel
from spard.models.base import load_base
from tests.spard.parts import write_model

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def file(header: dict[str, object], data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


LIARS = {
    "a header of 2 GB": struct.pack("<Q", 2 << 30) + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "tensors that overlap": file({"a": F32, "b": F32}),
    "data beyond the end": file({"a": F32 | {"shape": [1 << 40], "data_offsets": [0, 4 << 40]}}),
    "a shape of more than its bytes": file({"a": F32 | {"shape": [1 << 30]}}),
    "metadata that is no text": file({"__metadata__": {"a": {"b": [[]] * 1000}}, "a": F32}),
    "no header": b"\0" * 4,
}


@pytest.mark.parametrize("content", LIARS.values(), ids=LIARS)
def test_weights_that_lie_are_refused_without_the_memory_they_claim(content: bytes, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    load_base(folder, device="cpu")  # what loading itself takes, on whatever machine, is taken
    (folder / "model.safetensors").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(InvalidModel):
        load_base(folder, device="cpu")

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
