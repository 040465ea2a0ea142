"""The kernel's word on want of memory, as it stands on plain hosts, in systemd units and in containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from worker.failures import Kills, Memory, MemoryKills

Host = Callable[..., MemoryKills]
V2 = "30 24 0:26 {within} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "31 24 0:27 {within} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
CPU = "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine with these files below /sys/fs/cgroup, our cgroup, and what is mounted."""

    def make(cgroup: str, mounts: str, files: dict[str, str], vmstat: str = "") -> MemoryKills:
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True, exist_ok=True)
        (proc / "self/cgroup").write_text(cgroup)
        (proc / "self/mountinfo").write_text(CPU + mounts)
        (proc / "vmstat").write_text(vmstat)
        write(tmp_path, files)
        return MemoryKills(proc, tmp_path)

    return make


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def events(oom: int, kills: int) -> str:
    return f"low 0\nhigh 0\nmax 9\noom {oom}\noom_kill {kills}\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("cgroup", "within", "own"),
    [
        ("0::/system.slice/spard.service\n", "/", "system.slice/spard.service/"),  # a unit
        ("0::/user.slice/user-1.slice/session-3.scope\n", "/", "user.slice/user-1.slice/session-3.scope/"),  # a login
        ("0::/\n", "/", ""),  # a container with a cgroup namespace of its own
        ("0::/docker/ab12\n", "/docker/ab12", ""),  # one without
        ("0::/docker/ab12\n", "/", ""),  # one whose mount shows less than it says
        ("0::/../../other\n", "/", ""),  # one that was moved
    ],
)
def test_a_kill_at_a_limit_of_ours_is_found(host: Host, tmp_path: Path, cgroup: str, within: str, own: str) -> None:
    found = host(cgroup, V2.format(within=within), {f"{own}memory.events": events(3, 1)})
    before = found.read()
    assert before == Kills(own=1, above=1, at_limit=3)
    assert found.memory_at_kill(before) is None
    write(tmp_path, {f"{own}memory.events": events(4, 2)})
    assert found.memory_at_kill(before) is Memory.limit


def test_a_kill_without_a_limit_is_for_want_of_the_machine_s_memory(host: Host, tmp_path: Path) -> None:
    name = "system.slice/spard.service/memory.events"
    found = host("0::/system.slice/spard.service\n", V2.format(within="/"), {name: events(0, 0)})
    before = found.read()
    write(tmp_path, {name: events(0, 1)})
    assert found.memory_at_kill(before) is Memory.machine


def test_a_limit_of_a_cgroup_above_counts(host: Host, tmp_path: Path) -> None:
    """A pod's limit: the kill is counted where the limit is, and above the container that we are in."""
    files = {"pod/one/memory.events": events(0, 0), "pod/memory.events": events(0, 0)}
    found = host("0::/pod/one\n", V2.format(within="/"), files)
    before = found.read()
    write(tmp_path, {"pod/memory.events": events(1, 1)})
    assert found.memory_at_kill(before) is Memory.limit


def test_version_1_is_read_and_its_peak_says_whether_a_limit_was_in_the_way(host: Host, tmp_path: Path) -> None:
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    files = {
        "memory/spard/memory.oom_control": control.format(0),
        "memory/spard/memory.limit_in_bytes": f"{64 << 20}\n",
        "memory/spard/memory.max_usage_in_bytes": f"{10 << 20}\n",
    }
    found = host("5:memory:/spard\n4:cpu,cpuacct:/other\n0::/else\n", V1.format(within="/"), files)
    before = found.read()
    write(tmp_path, {"memory/spard/memory.oom_control": control.format(1)})
    assert found.memory_at_kill(before) is Memory.machine
    write(tmp_path, {"memory/spard/memory.max_usage_in_bytes": f"{64 << 20}\n"})
    assert found.memory_at_kill(before) is Memory.limit
    assert found.describe() == "spard: peak 64 MB of 64 MB"


def test_a_cgroup_without_a_limit_says_so(host: Host) -> None:
    files = {"a/memory.events": events(0, 0), "a/memory.peak": f"{3 << 20}\n", "a/memory.max": "max\n"}
    assert host("0::/a\n", V2.format(within="/"), files).describe() == "a: peak 3 MB of no limit"


def test_the_count_of_the_whole_machine_stands_where_no_cgroup_can_be_read(host: Host, tmp_path: Path) -> None:
    found = host("", "", {}, vmstat="pgfault 5\noom_kill 2\n")
    before = found.read()
    assert before == Kills(above=2)
    (tmp_path / "proc/vmstat").write_text("oom_kill 3\n")
    assert found.memory_at_kill(before) is Memory.machine


def test_a_kernel_that_tells_nothing_has_killed_nothing(tmp_path: Path) -> None:
    found = MemoryKills(tmp_path / "absent", tmp_path)
    assert (found.read(), found.memory_at_kill(Kills()), found.describe()) == (Kills(), None, "")
