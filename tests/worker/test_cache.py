"""What jobs on one machine share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.pipeline import FolderCache


@pytest.fixture
def cache(tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path / "cache")


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").rglob("*.*")
    return path


def test_an_entry_is_made_once(cache: FolderCache) -> None:
    made = [cache.json("audits", {"a": 1}, partial(list, [number])) for number in (1, 2)]
    assert made == [[1], [1]]


def test_another_key_is_another_entry(cache: FolderCache) -> None:
    made = [cache.json("audits", {"a": number}, partial(list, [number])) for number in (1, 2)]
    assert made == [[1], [2]]


def test_tensors_come_back_as_they_were(cache: FolderCache) -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.tensor("embeddings", {}, lambda: rows)
    found = cache.tensor("embeddings", {}, lambda: torch.zeros(1))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rows)


@pytest.mark.parametrize("kind", ["tensor", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_made_anew(cache: FolderCache, tmp_path: Path, kind: str, damage: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: cache.tensor("x", {}, lambda: torch.ones(4)),
        "json": lambda: cache.json("x", {}, lambda: [1.0]),
    }
    makers[kind]()
    content = bytearray(the_file(tmp_path).read_bytes())
    content[-3] ^= 1
    damaged: dict[str, bytes] = {"flip": bytes(content), "cut": bytes(content[:-3]), "empty": b""}
    the_file(tmp_path).write_bytes(damaged[damage])
    assert float(makers[kind]()[0]) == 1.0


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert FolderCache(tmp_path / "file").json("audits", {}, lambda: [1]) == [1]


def test_tensors_are_mapped_and_not_read_into_memory(cache: FolderCache) -> None:
    cache.tensor("embeddings", {}, lambda: torch.ones(2**20, 8))
    before = anonymous()
    found = cache.tensor("embeddings", {}, lambda: torch.zeros(1))
    assert float(found.sum()) == 2**23
    assert anonymous() - before < 2**24  # half of the tensor


def anonymous() -> int:
    """Bytes of memory that no file stands for."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def test_nothing_half_written_is_left(cache: FolderCache, tmp_path: Path) -> None:
    cache.json("audits", {}, lambda: [1])
    assert not list((tmp_path / "cache").rglob(".aside-*"))
