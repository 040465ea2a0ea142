"""The paths that an isolated process may read besides its folder: interpreter, libraries, installed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "alternatives", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf",
    "passwd",
)  # fmt: skip
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime")
_OWN = Path(__file__).parents[2]  # the folder of our packages: a checkout or site-packages
_PACKAGES = ("app", "spard", "worker")


@cache
def standard_library() -> list[str]:
    """Return the paths that a running Python still loads from: its own and the system's libraries."""
    stdlib = Path(os.__file__).parent
    return _existing_paths([*_LIBRARIES, str(stdlib), *map(str, stdlib.parent.glob("libpython*"))])


def interpreter() -> list[str]:
    """Return the paths that Python needs to run without installed packages."""
    return _existing_paths([*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS), sys.base_prefix, *_hops(sys.executable)])


@cache
def program() -> tuple[str, ...]:
    """Return the paths that Python needs to run installed packages, and packages loaded from elsewhere."""
    paths = [*interpreter(), sys.prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
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


def model(path: str) -> list[str]:
    """Return a model's folder or file, and the folders that its links lead to."""
    found = [path, os.path.realpath(path)]
    for folder, _, names in os.walk(path):
        linked = [each for name in names if os.path.islink(each := os.path.join(folder, name))]
        found += sorted({os.path.dirname(os.path.realpath(each)) for each in linked})
    return list(dict.fromkeys(found))


def _existing_paths(paths: Iterable[str]) -> list[str]:
    """Return the existing paths with the targets of links, without paths inside other ones."""
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
