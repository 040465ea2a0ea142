from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spard.digests import file_sha256
from spard.errors import CorruptCheckpoint
from spard.training.resume_state import load, newest_first, save, verify

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(0.1)}
STATE = {"step": 3, "loss": 0.1 + 0.2}


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    saved = save(tmp_path, 3, TENSORS, STATE)

    tensors, state = load(saved.path)

    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert state == STATE
    assert saved.path.name == "step-000003"
    assert saved.sha256 == file_sha256(saved.path / "manifest.json")


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 3, TENSORS, STATE).path
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)

    with pytest.raises(CorruptCheckpoint, match=name):
        load(path)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 3, TENSORS, STATE).path
    (path / name).unlink()
    with pytest.raises(CorruptCheckpoint, match="incomplete"):
        verify(path)


def test_a_corrupt_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = save(tmp_path, 3, TENSORS, STATE).path, save(tmp_path, 6, TENSORS, STATE).path
    (newer / "state.json").write_text("{}")

    assert list(newest_first(tmp_path)) == [older]
    assert "step-000006" in caplog.text


def test_two_are_kept_the_last_written_among_them_and_nothing_aside(tmp_path: Path) -> None:
    for step in (3, 12, 120, 7):
        save(tmp_path, step, TENSORS, STATE, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007", "step-000120"]


def test_steps_of_more_digits_than_are_filled_up_are_in_order_too(tmp_path: Path) -> None:
    older, newer = (save(tmp_path, step, TENSORS, STATE, keep=2).path for step in (999_999, 1_000_000))
    assert list(newest_first(tmp_path)) == [newer, older]
    newest = save(tmp_path, 1_000_001, TENSORS, STATE, keep=2).path
    assert list(newest_first(tmp_path)) == [newest, newer]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, TENSORS, STATE)
    path = save(tmp_path, 3, TENSORS, {"step": 4}).path
    assert load(path)[1] == {"step": 4}
