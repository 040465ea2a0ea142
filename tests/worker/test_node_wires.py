"""How the worker of a job on several machines and the followers on the others speak, and what it makes of silence."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

from app.errors import Unfit
from app.settings import Settings
from tests.worker.parts import job_folder
from tests.worker.shop import WAIT_S, Shop, scripted_command, wait_until
from worker import follower, nodes
from worker.failures import NODE_LOST, OUT_OF_MEMORY, RANK_LOST, Failed
from worker.nodes import Nodes, Wire
from worker.sandbox import AllowedPaths
from worker.workdir import Folder, Rendezvous, read_meeting

Join = Callable[..., Wire]
LOST_S = 60.0  # a busy machine must not be silent for so long


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", nodes_per_job=2, nodes_port=free_port(), nodes_wait_s=WAIT_S)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Folder:
    return job_folder(tmp_path / "job-a1", model)


@pytest.fixture
def join(settings: Settings) -> Iterator[Join]:
    wires = list[Wire]()

    def join_node(*, job: str = "ftjob-1", token: int = 0, node: int = 1, lost_s: float = LOST_S) -> Wire:
        wire = Wire(connect(settings), lost_s)
        wire.tell({"kind": "join", "job": job, "token": token, "node": node})
        wires.append(wire)
        return wire

    yield join_node
    for wire in wires:
        wire.close()


def gather_nodes(settings: Settings, join: Join, folder: Folder) -> tuple[Nodes, Wire]:
    """The worker's side with one follower that was told to start."""
    found = Nodes(settings, "ftjob-1", 0, LOST_S)
    wire = join()
    assert found.gather(Event())
    found.start(folder, AllowedPaths(("/models",), ("/cache",)))
    return found, wire


def connect(settings: Settings) -> socket.socket:
    return socket.create_connection(("127.0.0.1", settings.nodes_port), timeout=WAIT_S)


def next_message(wire: Wire) -> dict[str, object] | None:
    return wire.next_message(WAIT_S)


def check_nodes(found: Nodes, is_so: bool = False) -> bool:
    """A fact, after a check that ended well."""
    found.check()
    return is_so


def expect_failure(found: Nodes) -> Failed:
    """What a check ends with, sooner or later."""
    with pytest.raises(Failed) as error:
        wait_until(lambda: check_nodes(found))
    return error.value


def test_all_are_told_what_to_start_and_where_the_ranks_meet(settings: Settings, join: Join, folder: Folder) -> None:
    found, wire = gather_nodes(settings, join, folder)
    with closing(found):
        told = {"kind": "start", "folder": str(folder.root), "readable": ["/models"], "writable": ["/cache"]}
        assert next_message(wire) == told
        met = read_meeting(folder)
        assert (met.nodes, met.address) == (2, "127.0.0.1")
        assert met.port > 0
        found.check()
    assert next_message(wire) == {"kind": "end"}
    wait_until(wire.is_lost.is_set)


def test_a_job_of_one_machine_waits_for_nobody(tmp_path: Path, folder: Folder) -> None:
    with closing(Nodes(Settings(data_dir=tmp_path), "ftjob-1", 0)) as found:
        assert found.gather(Event())
        found.start(folder, AllowedPaths())
        found.check(ours_ended=True)
    assert read_meeting(folder) == Rendezvous()


@pytest.mark.parametrize(
    "wrong", [{"job": "ftjob-2"}, {"token": 1}, {"node": 0}, {"node": 2}], ids=lambda wrong: next(iter(wrong))
)
def test_whoever_is_not_of_this_attempt_is_sent_away(settings: Settings, join: Join, wrong: dict[str, int]) -> None:
    with closing(Nodes(settings, "ftjob-1", 0, LOST_S)) as found:
        stranger, right = join(**wrong), join()
        assert found.gather(Event())
        wait_until(stranger.is_lost.is_set)
        assert not right.is_lost.is_set()


@pytest.mark.parametrize("said", [b"no json\n", b"[1]\n", b'{"kind": 1}\n', b"x" * (2 << 20)])
def test_what_is_no_message_ends_a_connection(settings: Settings, join: Join, said: bytes) -> None:
    with closing(Nodes(settings, "ftjob-1", 0, LOST_S)) as found, connect(settings) as end:
        Thread(target=end.sendall, args=(said,), daemon=True).start()
        join()
        assert found.gather(Event())


def test_it_does_not_wait_when_it_is_told_to_stop_or_the_time_is_over(settings: Settings) -> None:
    stop = Event()
    stop.set()
    hasty = settings.model_copy(update={"nodes_wait_s": 0.01})
    for asked, told in ((settings, stop), (hasty, Event())):
        with closing(Nodes(asked, "ftjob-1", 0)) as found:
            assert not found.gather(told)


def test_one_that_leaves_before_all_are_there_ends_the_wait(settings: Settings, join: Join) -> None:
    three = settings.model_copy(update={"nodes_per_job": 3})
    with closing(Nodes(three, "ftjob-1", 0, LOST_S)) as found:
        answers = list[bool]()
        waiting = Thread(target=lambda: answers.append(found.gather(Event())))
        waiting.start()
        join(node=2).close()
        waiting.join(WAIT_S)
        assert answers == [False]


def test_a_port_that_is_taken_is_told(settings: Settings) -> None:
    with closing(Nodes(settings, "ftjob-1", 0)), pytest.raises(Unfit, match="SPARD_NODES_PORT is"):
        Nodes(settings, "ftjob-1", 0)


def test_a_machine_that_is_gone_is_lost(settings: Settings, join: Join, folder: Folder) -> None:
    found, wire = gather_nodes(settings, join, folder)
    with closing(found):
        wire.close()
        assert expect_failure(found).what == NODE_LOST


def test_a_machine_that_is_silent_is_lost(settings: Settings, folder: Folder) -> None:
    with closing(Nodes(settings, "ftjob-1", 0, lost_s=0.5)) as found, connect(settings) as end:
        hello = {"kind": "join", "job": "ftjob-1", "token": 0, "node": 1}
        end.sendall(json.dumps(hello).encode() + b"\n")
        assert found.gather(Event())
        found.start(folder, AllowedPaths())
        assert expect_failure(found).what == NODE_LOST


def test_an_end_that_has_nothing_to_say_beats(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.nodes_port)) as listener, connect(settings) as end:
        accepted, _ = listener.accept()
        with closing(Wire(accepted, lost_s=1.0)), end.makefile("rb") as lines:
            assert json.loads(lines.readline()) == {"kind": "beat"}


def test_ranks_that_ended_elsewhere_end_the_attempt_when_ours_wait_on(
    settings: Settings, join: Join, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wire = gather_nodes(settings, join, folder)
    with closing(found):
        wire.tell({"kind": "ended", "is_done": False, "is_out_of_memory": False})
        found.check(ours_ended=True)  # ours say what they know
        monkeypatch.setattr(nodes, "_GRACE_S", 0.0)
        assert expect_failure(found).what == RANK_LOST


def test_ranks_that_are_done_elsewhere_are_no_reason_to_end(settings: Settings, join: Join, folder: Folder) -> None:
    found, wire = gather_nodes(settings, join, folder)
    with closing(found):
        wire.tell({"kind": "ended", "is_done": True, "is_out_of_memory": False})
        wire.tell({"kind": "leaving"})
        wait_until(lambda: check_nodes(found, folder.stop.exists()))


def test_too_little_memory_elsewhere_is_told_as_such(settings: Settings, join: Join, folder: Folder) -> None:
    found, wire = gather_nodes(settings, join, folder)
    with closing(found):
        wire.tell({"kind": "ended", "is_done": False, "is_out_of_memory": True})
        assert expect_failure(found).what == OUT_OF_MEMORY


def follow(settings: Settings, stop: Event) -> Callable[[], list[bool]]:
    """A follower in a thread; call the result to wait for what it ends with."""
    asked, ended = argparse.Namespace(leader="127.0.0.1", job="ftjob-1", token=0, node=1), list[bool]()
    thread = Thread(target=lambda: ended.append(follower.follow(asked, settings, stop, LOST_S)))
    thread.start()

    def wait() -> list[bool]:
        thread.join(WAIT_S)
        return ended

    return wait


def test_a_follower_says_how_its_child_ended_and_waits_for_the_end(
    settings: Settings, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "COMMAND", scripted_command("crash"))
    monkeypatch.setattr(nodes, "_GRACE_S", 0.0)
    with closing(Nodes(settings, "ftjob-1", 0, LOST_S)) as found:
        wait = follow(settings, Event())
        assert found.gather(Event())
        found.start(folder, AllowedPaths())
        assert expect_failure(found).what == RANK_LOST
    assert wait() == [True]


def test_a_follower_that_is_to_stop_has_the_ranks_save(
    settings: Settings, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "COMMAND", scripted_command("slow"))
    stop = Event()
    with closing(Nodes(settings, "ftjob-1", 0, LOST_S)) as found:
        wait = follow(settings, stop)
        assert found.gather(Event())
        found.start(folder, AllowedPaths())
        wait_until((folder.root / "is_slow").exists)  # it has begun
        stop.set()
        wait_until(lambda: check_nodes(found, folder.stop.exists()))
    assert wait() == [True]


def test_a_follower_ends_when_its_worker_is_gone_or_never_comes(
    settings: Settings, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "COMMAND", scripted_command("slow"))
    with socket.create_server(("127.0.0.1", settings.nodes_port)) as listener:
        wait = follow(settings, Event())
        end, _ = listener.accept()
        end.recv(1)
        end.close()
    assert wait() == [False]
    assert follow(settings.model_copy(update={"nodes_wait_s": 0.01}), Event())() == [False]


def test_a_follower_that_is_to_stop_before_it_was_told_to_start_leaves(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "COMMAND", scripted_command("slow"))
    stop = Event()
    with closing(Nodes(settings, "ftjob-1", 0, LOST_S)) as found:
        wait = follow(settings, stop)
        assert found.gather(Event())
        stop.set()
        assert wait() == [False]


def test_a_worker_that_polls_serves_no_job_of_several_machines(
    light_shop: Shop, capfd: pytest.CaptureFixture[str]
) -> None:
    assert light_shop.start("worker", nodes_per_job=2).wait(WAIT_S) == 1
    assert "SPARD_NODES_PER_JOB is for `--job`" in capfd.readouterr().err
