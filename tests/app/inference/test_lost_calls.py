"""What dead API processes leave behind: their requests are billed with what was sent, and reserve nothing any more."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app import keys, quotas
from app.db import now, read, transaction
from app.db.base import utc_now
from app.db.tables import InferenceCall, Project, Quota
from app.db.tables.inference import PROCESS_LOST, RUNNING
from app.errors import QuotaExceeded
from app.inference.call_leases import MOST_OPEN, CallLeases, Ledger, complete_lost, ledger_folder, lock_abandoned
from app.settings import Settings

PROJECT = "org-mine"
KILLED = """
import os, signal, sys
from pathlib import Path
from app.inference.call_leases import Ledger
ledger = Ledger(Path(sys.argv[1]))
entries = [ledger.open(f"call_{name}") for name in "abc"]
for entry in entries[:2]:
    entry.note_prompt(7)
entries[0].note_sent(25)
entries[0].note_sent(26)
print(ledger.owner, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def key_id(engine: Engine) -> str:
    """A key of a project that may use 3,000 tokens a day."""
    with transaction(engine) as session:
        session.add(Project(id=PROJECT, name=PROJECT))
        session.flush()
        session.add(Quota(project_id=PROJECT, max_tokens_per_day=3000))
        return keys.create(session, PROJECT, "test", ["customer"])[0].id


def add_call(
    engine: Engine, key_id: str, name: str, owner: str | None, lease_s: float | None, **columns: object
) -> None:
    with transaction(engine) as session:
        call = InferenceCall(id=f"call_{name}", project_id=PROJECT, key_id=key_id, endpoint="chat.completions")
        call.model, call.owner, call.status = "tiny", owner, RUNNING
        call.lease_expires_at = None if lease_s is None else now() + lease_s
        for column, value in columns.items():
            setattr(call, column, value)
        session.add(call)


def counts(engine: Engine, name: str) -> tuple[str, int, int, int, float | None]:
    with read(engine) as session:
        call = session.get_one(InferenceCall, f"call_{name}")
        return call.status, call.prompt_tokens, call.reply_tokens, call.reserved_tokens, call.lease_expires_at


def kill_process(folder: Path) -> str:
    """A process that had sent 26 tokens of one of its three requests, and was killed; return its name."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    return done.stdout.strip()


def test_requests_of_a_killed_process_are_billed_with_what_was_sent(
    engine: Engine, key_id: str, tmp_path: Path
) -> None:
    owner = kill_process(tmp_path)
    for name in "abcd":  # the last had its row, and no count yet
        add_call(engine, key_id, name, owner, 90.0, reserved_tokens=2988, prompt_tokens=0)
    add_call(engine, key_id, "e", "another", 90.0, reserved_tokens=5)
    assert complete_lost(engine, tmp_path) == 4
    assert counts(engine, "a") == (PROCESS_LOST, 7, 26, 0, None)
    for name in "bcd":
        assert counts(engine, name) == (PROCESS_LOST, 0, 0, 0, None)
    assert counts(engine, "e")[:4] == (RUNNING, 0, 0, 5)
    assert not (tmp_path / owner).exists()
    with transaction(engine) as session:
        room = quotas.room_for_tokens(session, PROJECT)
    assert room == quotas.TokenRoom(3000 - 33, 5)


def test_an_answer_that_was_complete_and_never_sent_costs_nothing(engine: Engine, key_id: str, tmp_path: Path) -> None:
    owner = kill_process(tmp_path)
    add_call(engine, key_id, "a", owner, None, status="done", prompt_tokens=7, reply_tokens=26)
    add_call(engine, key_id, "b", owner, None, status="done", prompt_tokens=7, reply_tokens=40)
    complete_lost(engine, tmp_path)
    assert counts(engine, "a")[:3] == ("done", 7, 26)
    assert counts(engine, "b")[:3] == ("done", 0, 0)


def test_a_ledger_of_a_process_that_lives_is_left_alone(engine: Engine, key_id: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open("call_a")
    add_call(engine, key_id, "a", ledger.owner, 90.0, reserved_tokens=10)
    assert complete_lost(engine, tmp_path) == 0
    assert counts(engine, "a")[0] == RUNNING
    ledger.close()
    assert complete_lost(engine, tmp_path) == 1


def test_where_the_machine_is_lost_the_last_count_in_the_database_stands(
    engine: Engine, key_id: str, tmp_path: Path
) -> None:
    add_call(engine, key_id, "a", "gone", -1.0, reserved_tokens=500, prompt_tokens=3, reply_tokens=20)
    add_call(engine, key_id, "b", "gone", -1.0, reserved_tokens=500, prompt_tokens=3)
    add_call(engine, key_id, "c", "there", 60.0, reserved_tokens=500)
    old = utc_now() - timedelta(hours=2)
    add_call(engine, key_id, "d", None, None, created_at=old, reply_tokens=1000)  # of an older version
    with transaction(engine) as session:
        room = quotas.room_for_tokens(session, PROJECT)
    assert room is not None
    assert room.reserved == 500  # those of processes that are gone count no more, before anybody has swept
    assert complete_lost(engine, tmp_path) == 3
    found = {name: counts(engine, name)[:4] for name in "abcd"}
    assert found == {
        "a": (PROCESS_LOST, 3, 20, 0),
        "b": (PROCESS_LOST, 0, 0, 0),
        "c": (RUNNING, 0, 0, 500),
        "d": (PROCESS_LOST, 0, 0, 0),
    }


def test_a_heartbeat_extends_leases_and_copies_counts(engine: Engine, key_id: str, tmp_path: Path) -> None:
    leases = CallLeases(engine, Settings(data_dir=tmp_path, heartbeat_s=3600.0))
    entry, other = leases.open("call_a"), leases.open("call_b")
    for name in "ab":
        add_call(engine, key_id, name, leases.owner, -1.0, reserved_tokens=100)
    entry.note_prompt(4)
    entry.note_sent(9)
    leases.beat()
    assert counts(engine, "a")[:4] == (RUNNING, 4, 9, 100)
    assert complete_lost(engine, ledger_folder(Settings(data_dir=tmp_path))) == 0
    other.ended_as = "done"  # its row was not taken when it ended
    other.close()
    leases.beat()
    assert counts(engine, "b") == ("done", 0, 0, 0, None)
    entry.close()
    leases.close()
    assert list(ledger_folder(Settings(data_dir=tmp_path)).iterdir()) == []


def test_slots_are_used_again_and_those_beyond_the_last_are_counted_in_the_database(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    entries = [ledger.open(f"call_{i}") for i in range(MOST_OPEN + 1)]
    entries[-1].note_sent(3)
    assert (entries[-1].slot, entries[-1].sent) == (None, 3)
    entries[5].note_sent(8)
    entries[5].close()
    assert ledger.open("call_again").slot == entries[5].slot
    ledger.close()
    with lock_abandoned(tmp_path / ledger.owner) as found:
        assert found is not None
    again = [each for each in found if each.call_id == "call_again"]
    assert [(each.prompt, each.sent) for each in again] == [(0, 0)]
    assert len(found) == MOST_OPEN


def test_a_folder_that_takes_no_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("a file is in the way")
    entry = Ledger(tmp_path / "calls").open("call_a")
    entry.note_sent(2)
    assert entry.sent == 2


def test_tokens_that_are_used_are_final(engine: Engine, key_id: str) -> None:
    add_call(engine, key_id, "a", "there", 60.0, status="done", reply_tokens=3000)
    with transaction(engine) as session, pytest.raises(QuotaExceeded):
        quotas.room_for_tokens(session, PROJECT)
