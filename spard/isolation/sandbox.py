"""Finds the kind of isolation that this machine supports, and starts processes in it.

Besides its folder an isolated process may read the interpreter, libraries and installed packages, and its model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from spard.isolation import filters, landlock
from spard.isolation.gate import Line, Order, Talks

Kind = Literal["namespaces", "landlock", "none"]

_OWN = Path(__file__).parents[2]  # the folder of our packages: a checkout or site-packages
_PROBE_S = 60.0
# Reads its folder, and prints True if it sees only its own processes.
_PROBE = """
import os, sys
os.listdir(sys.stdin.readline().strip())
print(sum(map(str.isdigit, os.listdir("/proc"))) < 9)
"""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The isolation that this machine supports; `missing` describes the gaps for the administrator."""

    kind: Kind
    missing: tuple[str, ...] = ()

    @property
    def are_whole(self) -> bool:
        """True if nothing is missing."""
        return not self.missing


@cache
def find_sandbox() -> Sandbox:
    """Return the isolation that works on this machine, found by trying; cached for the process."""
    if sys.platform != "linux" or not filters.is_known():
        return Sandbox("none", ("all isolation (it needs Linux on x86_64 or aarch64)",))
    said, why = _probe_sandbox("namespaces")
    if said == "True":
        return Sandbox("namespaces")
    if said:
        return Sandbox("namespaces", ("a /proc of its own processes (masked in this container; names are seen)",))
    missing = [f"user namespaces with mounts ({why})"]
    if landlock.version() and _probe_sandbox("landlock")[0]:
        if not landlock.scopes_signals():
            missing.append("signals kept inside (Landlock 6)")
        return Sandbox("landlock", (*missing, "a network of its own where several GPUs train one job"))
    return Sandbox("none", (*missing, "Landlock"))


def isolated_command(sandbox: Sandbox, command: Sequence[str], *, talks: Talks = "alone") -> list[str]:
    """Return a command line that runs `command` in isolation; `talks` are the allowed socket peers.

    The command gets its parent's process id as its last argument, and reads its folder from standard input after `line`
    was written there.
    """
    order: Order = {"sandbox": sandbox.kind, "parent": os.getpid(), "talks": talks}
    return [*python("spard.isolation.gate"), json.dumps(order), *command]


def line(folder: Path, readable: Iterable[str], writable: Iterable[str], hidden: Iterable[str]) -> bytes:
    """Return the line that completes the isolation and names the folder; no path in `hidden` is readable."""
    return _line(None, str(folder), readable, writable, hidden)


def ahead(told: str, readable: Iterable[str], hidden: Iterable[str]) -> bytes:
    """Return the line for a process that has no folder yet, which limits it to these paths until then."""
    return _line(told, "", readable, (), hidden)


def _line(
    told: str | None, folder: str, readable: Iterable[str], writable: Iterable[str], hidden: Iterable[str]
) -> bytes:
    line: Line = {
        "ahead": told,
        "folder": folder,
        "listed": checkouts(),
        "readable": [*exclude_hidden(program_paths(), hidden), *readable],
        "writable": list(writable),
    }
    return json.dumps(line).encode() + b"\n"


def python(module: str) -> list[str]:
    """Return the start of a command that runs `main` of one of our modules, without installed packages."""
    boot = f"import sys; sys.path.append({str(_OWN)!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", boot]


def _probe_sandbox(kind: Kind) -> tuple[str, str]:
    """Return the probe's output in an isolation of this kind, and the reason if there is none."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603 - our own text
            isolated_command(Sandbox(kind), [sys.executable, "-I", "-S", "-c", _PROBE]),
            input=line(Path(os.path.realpath(folder)), (), (), ()),
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    why = done.stderr.decode(errors="replace").strip().splitlines()
    return done.stdout.decode(errors="replace").strip(), why[-1] if why else "refused"


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "alternatives", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf",
    "passwd",
)  # fmt: skip
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime")
_PACKAGES = ("app", "spard", "worker")


@cache
def library_paths() -> list[str]:
    """Return the paths that a running Python still loads from: its own and the system's libraries."""
    stdlib = Path(os.__file__).parent
    return _existing_paths([*_LIBRARIES, str(stdlib), *map(str, stdlib.parent.glob("libpython*"))])


def interpreter_paths() -> list[str]:
    """Return the paths that Python needs to run without installed packages."""
    return _existing_paths([*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS), sys.base_prefix, *_hops(sys.executable)])


@cache
def program_paths() -> tuple[str, ...]:
    """Return the paths that Python needs to run installed packages, and packages loaded from elsewhere."""
    paths = [*interpreter_paths(), sys.prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    for entry in dict.fromkeys([*filter(os.path.isabs, sys.path), *checkouts()]):
        if entry in checkouts():
            loaded = {name.partition(".")[0] for name in list(sys.modules)}
            paths += [f"{entry}/{name}" for name in sorted(loaded | {*_PACKAGES})]
        else:
            paths.append(entry)
    return tuple(_existing_paths([*paths, *_extensions()]))


def checkouts() -> list[str]:
    """Return the folder of our packages if they are not installed; it contains other files too.

    With an editable installation the folder is used without being on the module path.
    """
    own = str(_OWN)
    return [] if _is_inside(own, (sys.prefix, sys.base_prefix)) else [own]


def _extensions() -> list[str]:
    """Return the folders of packages that offer us judges, defenses and the like by entry points.

    A package in an editable installation is in no folder of the module path: a finder knows where it is.
    """
    entries = [entry for each in distributions() for entry in each.entry_points if entry.group.startswith("spard.")]
    names = {entry.module.partition(".")[0] for entry in entries}
    specs = [spec for name in sorted(names) if (spec := find_spec(name))]
    return [place for spec in specs for place in spec.submodule_search_locations or [spec.origin or ""]]


def exclude_hidden(paths: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """Return the paths, with each folder that contains a hidden path replaced by its other entries."""
    secrets = [os.path.realpath(each) for each in hidden]
    found: list[str] = []
    for path in paths:
        real = os.path.realpath(path)
        if any(_is_inside(real, (each,)) for each in secrets):
            continue
        if os.path.islink(path) or not any(_is_inside(each, (real,)) for each in secrets):
            found.append(path)
        else:
            found += exclude_hidden([f"{path}/{name}" for name in sorted(os.listdir(path))], secrets)
    return found


def model_paths(path: str) -> list[str]:
    """Return a model's folder or file, and the folders that its links lead to."""
    found = [path, os.path.realpath(path)]
    for folder, _, names in os.walk(path):
        linked = [each for name in names if os.path.islink(each := os.path.join(folder, name))]
        found += sorted({os.path.dirname(os.path.realpath(each)) for each in linked})
    return list(dict.fromkeys(found))


def _existing_paths(paths: Iterable[str]) -> list[str]:
    """Return the existing paths and the targets of links, without paths that lie inside another of the paths."""
    there = [path.rstrip("/") for path in paths if path.rstrip("/") and os.path.lexists(path)]
    both = dict.fromkeys(each for path in there for each in (path, os.path.realpath(path)))
    return [each for each in both if os.path.islink(each) or not _is_inside(os.path.dirname(each), both)]


def _hops(path: str) -> list[str]:
    """Return a path and the targets of its chain of links."""
    found = [path]
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        found.append(path)
    return found


def _is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
