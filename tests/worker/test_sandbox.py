"""A hostile child: whatever it tries in its sandbox, it learns no bit of what its job is not made of."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import pytest
from pydantic import SecretStr

from app.settings import Settings
from spard.isolation import landlock, sandbox
from spard.isolation.gate import Talks
from spard.isolation.sandbox import Sandbox
from tests.spard.hostile import BITS, SECRET, WORD, Prey, prey
from tests.worker.parts import job_folder
from worker.process import Child, environment
from worker.protocol import ModelRequest
from worker.sandbox import ChildSandbox
from worker.workdir import Folder, new_folder

WAIT_S = 300.0
KINDS = [
    pytest.param(
        "namespaces",
        marks=pytest.mark.skipif(
            sandbox.find_sandbox().kind != "namespaces",
            reason="this kernel or container gives no user namespaces with mounts",
        ),
    ),
    pytest.param(
        "landlock",
        marks=pytest.mark.skipif(not landlock.scopes_signals(), reason="this kernel has no Landlock of version 6"),
    ),
]
# Tries every way that lies in its folder, and says how many bits of the secret each gave.
TRY = """
import json, sys
folder = sys.stdin.readline().strip()
secret, ways = json.load(open(f"{folder}/ways.json"))
bits = {}
for name, way in ways.items():
    scope = {}
    try:
        exec(way, scope)
    except BaseException:
        pass
    found = bytes(scope.get("found") or b"")[:32]
    bits[name] = sum(bin(a & b).count("1") for a, b in zip(found, bytes.fromhex(secret)))
print(json.dumps({"kind": "bits", "bits": bits}), flush=True)
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Settings, Prey]]:
    """An embedded installation with secrets in all its places, in a process that has one in its environment."""
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SPARD_ADMIN_KEY", "TORCH_SECRET", "NVIDIA_API_KEY"):
        monkeypatch.setenv(name, WORD)
    data = tmp_path / "data"
    settings = Settings(data_dir=data, admin_key=SecretStr(WORD), signing_key=tmp_path / "signing_key.pem")
    with prey(tmp_path) as found:
        for name in ("spard.db", "objects/tenants/other/file", "work/other-a1/in/training.jsonl", "signing_key.pem"):
            found.hide(data / name)
        yield settings, found


def seccomp_bits(
    settings: Settings, kind: sandbox.Kind, ways: dict[str, str], talks: Talks = "alone"
) -> dict[str, int]:
    cell = ChildSandbox(Sandbox(kind), talks, ChildSandbox.from_settings(settings).hidden)
    child = Child([sys.executable, "-P", "-c", TRY], environment(settings), cell)
    with ExitStack() as ended:
        ended.callback(child.kill)
        folder = ended.enter_context(new_folder(settings.work_dir(), "own-a1"))
        (folder.root / "ways.json").write_text(json.dumps([SECRET.hex(), ways]))
        child.work(folder)
        message = child.receive(WAIT_S)
    assert message is not None
    assert message["kind"] == "bits"
    bits: dict[str, int] = message["bits"]
    return bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_child_reads_no_bit_of_a_secret(house: tuple[Settings, Prey], kind: sandbox.Kind) -> None:
    settings, found = house
    assert seccomp_bits(settings, kind, found.ways()) == dict.fromkeys(found.ways(), 0)


needs_ports = pytest.mark.skipif(not landlock.limits_ports(), reason="this kernel has no Landlock of version 4")


def fixed_port() -> int:
    """A free port below those that the kernel hands out, as databases have."""
    for port in range(20_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@needs_ports
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_that_speaks_with_other_machines_reaches_no_server_on_a_fixed_port_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: sandbox.Kind
) -> None:
    monkeypatch.setenv("TORCH_SECRET", WORD)
    settings = Settings(data_dir=tmp_path / "data", nodes_per_job=2)
    assert ChildSandbox.from_settings(settings).talks == "nodes"
    with prey(tmp_path, fixed_port()) as found:
        found.hide(settings.data_dir / "spard.db")
        assert seccomp_bits(settings, kind, found.ways(), "nodes") == dict.fromkeys(found.ways(), 0)


@needs_ports
@pytest.mark.parametrize("kind", KINDS)
def test_it_reaches_the_ports_that_ranks_listen_on_whoever_has_them(tmp_path: Path, kind: sandbox.Kind) -> None:
    with prey(tmp_path) as found:
        ways = {"network": found.ways()["network"]}
        assert seccomp_bits(Settings(data_dir=tmp_path / "data"), kind, ways, "nodes") == {"network": BITS}


# Tries its ways before it has a folder, and once more in it; says which bits it got, and which paths it could list.
TRY_TWICE = """
import json, os, sys
def tried(ways, paths):
    if os.fork():  # some ways leave the namespace
        return os.wait()
    bits, seen = {}, [path for path in paths if os.path.exists(path)]
    for name, way in ways.items():
        scope = {}
        try:
            exec(way, scope)
        except BaseException:
            pass
        found = bytes(scope.get("found") or b"")[:32]
        bits[name] = sum(bin(a & b).count("1") for a, b in zip(found, bytes.fromhex(secret)))
    print(json.dumps({"kind": "bits", "bits": bits, "seen": seen}), flush=True)
    os._exit(0)
secret, ways, paths = json.loads(sys.stdin.readline())
tried(ways, paths)
tried(ways, [*paths, sys.stdin.readline().strip()])
"""
UNCOVER = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.umount2(b"/.before", 2)
libc.unshare(0x10020000)  # a user and a mount namespace
libc.umount2(b"/.before", 2)
found = open("/.before" + {path!r}, "rb").read()
"""


@pytest.mark.skipif(sandbox.find_sandbox().kind != "namespaces", reason="elsewhere a sandbox does not close twice")
def test_while_it_reads_ahead_a_child_reaches_the_model_and_nothing_else(
    house: tuple[Settings, Prey], tmp_path: Path
) -> None:
    """Nor does it reach afterward what only the sandbox of the reading let through."""
    settings, found = house
    model, other = tmp_path / "model", tmp_path / "other"
    for path in (model, other):
        path.mkdir()
    with new_folder(settings.work_dir(), "own-a1") as folder:
        ways = found.ways() | {"under the cover": UNCOVER.format(path=str(found.file))}
        paths = [str(model), str(other), str(folder.root)]
        child = Child(
            [sys.executable, "-P", "-c", TRY_TWICE], environment(settings), ChildSandbox(Sandbox("namespaces"))
        )
        with ExitStack() as ended:
            ended.callback(child.kill)
            hidden = map(str, ChildSandbox.from_settings(settings).hidden)
            child._write(sandbox.ahead(json.dumps([SECRET.hex(), ways, paths]), [str(model)], hidden))
            waiting = child.receive(WAIT_S)
            child.work(folder)
            working = child.receive(WAIT_S)
    none = dict.fromkeys(ways, 0)
    assert waiting == {"kind": "bits", "bits": none, "seen": [str(model)]}
    assert working == {"kind": "bits", "bits": none, "seen": [str(folder.root), str(folder.root)]}


def test_behind_landlock_nothing_is_read_ahead(model: Path) -> None:
    assert ChildSandbox(Sandbox("landlock")).read_ahead_line(ModelRequest(str(model), None, "none", {})) is None


def test_a_worker_says_where_ports_cannot_be_kept_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 3)
    told = "ports of other machines kept away (Landlock 4)"
    assert ChildSandbox(Sandbox("namespaces"), "nodes").missing == (told,)
    assert ChildSandbox(Sandbox("namespaces"), "machine").missing == ()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_behind_the_walls_of_two_machines_meet(tmp_path: Path, kind: sandbox.Kind) -> None:
    """What gloo needs is let through: names, streams, ports that the kernel hands out."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = """
import json, os, sys
sys.stdin.readline()
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
print(json.dumps({"kind": "sum", "sum": found.item()}), flush=True)
dist.destroy_process_group()
"""
    settings = Settings(data_dir=tmp_path / "data")
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    with ExitStack() as ended:
        children = list[Child]()
        for rank in ("0", "1"):
            told = environment(settings) | meet | {"RANK": rank}
            child = Child([sys.executable, "-P", "-c", code], told, ChildSandbox(Sandbox(kind), "nodes"))
            ended.callback(child.kill)
            children.append(child)
            child.work(ended.enter_context(new_folder(settings.work_dir(), f"own-a{rank}")))
        assert [child.receive(WAIT_S) for child in children] == [{"kind": "sum", "sum": 2.0}] * 2


def test_without_walls_it_would_read_them_all(house: tuple[Settings, Prey]) -> None:
    settings, found = house
    names = ["file", "network", "abstract socket", *(name for name in found.ways() if name.startswith("file /"))]
    ways = {name: found.ways()[name] for name in names}
    assert seccomp_bits(settings, "none", ways) == dict.fromkeys(names, BITS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_reads_its_model_and_writes_its_folder_and_the_cache(
    tmp_path: Path, model: Path, kind: sandbox.Kind
) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    code = f"""
import os, sys, json, tempfile
folder = sys.stdin.readline().strip()
cache = json.load(open(f"{{folder}}/job.json"))["cache_dir"]
import sqlite3, spard.config
assert len(open({str(linked / "config.json")!r}).read()) > 10
for path in (f"{{folder}}/out/x", f"{{cache}}/x", tempfile.mkstemp()[1], os.path.expanduser("~/x")):
    open(path, "w").write("1")
for path in ({str(linked / "config.json")!r}, spard.config.__file__):
    try:
        open(path, "a")
    except OSError:
        continue
    sys.exit(f"{{path}} can be written")
print(json.dumps({{"kind": "well"}}), flush=True)
"""
    child = Child([sys.executable, "-P", "-c", code], environment(settings), ChildSandbox(Sandbox(kind)))
    try:
        folder = job_folder(tmp_path / "job", linked)
        child.work(Folder(folder.root))
        message = child.receive(WAIT_S)
    finally:
        child.kill()
    assert message == {"kind": "well"}
    assert (folder.results / "x").read_text() == "1"


def test_a_child_s_environment_is_a_list_and_holds_no_secret(house: tuple[Settings, Prey]) -> None:
    settings, _ = house
    assert WORD not in environment(settings).values()


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize(("code", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)])
def test_a_child_ends_as_what_it_runs_has_ended(tmp_path: Path, kind: sandbox.Kind, code: str, status: int) -> None:
    text = f"import os, sys; sys.stdin.readline(); {code}"
    child = Child(
        [sys.executable, "-P", "-c", text], environment(Settings(data_dir=tmp_path)), ChildSandbox(Sandbox(kind))
    )
    with new_folder(tmp_path, "job") as folder:
        child.work(folder)
        while not child.is_over:
            child.receive(WAIT_S)
        assert child.exit_code == status
        child.kill()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_nothing_that_a_child_started_outlives_it(tmp_path: Path, kind: sandbox.Kind) -> None:
    left = "import fcntl, time; held = open({!r}, 'w'); fcntl.flock(held, 2); print(flush=True); time.sleep(1e6)"
    text = f"""
import subprocess, sys
folder = sys.stdin.readline().strip()
code = {left!r}.format(f"{{folder}}/held")
left = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
left.stdout.readline()
"""
    child = Child(
        [sys.executable, "-P", "-c", text], environment(Settings(data_dir=tmp_path)), ChildSandbox(Sandbox(kind))
    )
    with new_folder(tmp_path, "job") as folder:
        child.work(folder)
        while not child.is_over:
            child.receive(WAIT_S)
        child.kill()
        with (folder.root / "held").open("r") as held:
            give_up_at = time.monotonic() + WAIT_S
            while not is_free(held) and time.monotonic() < give_up_at:
                time.sleep(0.05)
            assert is_free(held)


def is_free(file: IO[str]) -> bool:
    """Whether no other process has locked a file: the kernel opens the lock of one that has ended."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@pytest.mark.parametrize("talks", ["alone", "nodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_programs_run_in_a_child_only_where_it_has_namespaces(tmp_path: Path, kind: sandbox.Kind, talks: Talks) -> None:
    code = """
import json, sys
folder = sys.stdin.readline().strip()
from spard.evaluation import scorers
said = [scorers.can_run_programs()]
if said == [True]:
    tests = f"import os; assert not os.path.exists({folder!r})"
    said += [scorers.passes_tests("x = 1", tests, 60.0), scorers.passes_tests("x = 1", "assert x == 2", 60.0)]
print(json.dumps({"kind": "said", "said": said}), flush=True)
"""
    told = environment(Settings(data_dir=tmp_path))
    child = Child([sys.executable, "-P", "-c", code], told, ChildSandbox(Sandbox(kind), talks))
    with new_folder(tmp_path, "job") as folder:
        try:
            child.work(folder)
            message = child.receive(WAIT_S)
        finally:
            child.kill()
    assert message == {"kind": "said", "said": [True, True, False] if kind == "namespaces" else [False]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_process_can_be_started_again_behind_the_walls(tmp_path: Path, model: Path, kind: sandbox.Kind) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    code = """
import json, subprocess, sys
sys.stdin.readline()
code = "import safetensors.torch"
done = subprocess.run([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True)
print(json.dumps({"kind": "well", "status": done.returncode, "said": done.stderr[-500:]}), flush=True)
"""
    child = Child([sys.executable, "-P", "-c", code], environment(settings), ChildSandbox(Sandbox(kind)))
    try:
        child.work(Folder(job_folder(tmp_path / "job", model).root))
        message = child.receive(WAIT_S)
    finally:
        child.kill()
    assert message is not None
    assert message["status"] == 0, message["said"]
