"""Resumable downloads: bytes go to a partial file, which gets its final name once it is complete and checked.

The partial file's name contains the object's ETag. The next attempt asks for the rest of exactly that object (RFC 9110,
Range and If-Range), and gets the whole object if it has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.client import Broken, Busy, Client
from app.commands.terminal import CommandFailed, warn

if TYPE_CHECKING:
    from httpx2 import Response

_PART = re.compile(r"\.([0-9A-Za-z-]{1,128})\.part")
_NO_TAG = "untagged"  # a partial file without an ETag, which cannot be resumed
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WAITS_S = (1.0, 2.0, 4.0)
_CHUNK_BYTES = 1 << 20
_PART_OF_IT, _NO_MORE_BYTES = 206, 416


@dataclass(frozen=True, slots=True)
class Saved:
    """A downloaded file; `resumed_at` is the size of the partial file before the last request."""

    path: Path
    bytes: int
    sha256: str
    resumed_at: int


def download(client: Client, url: str, path: Path, check: Callable[[Path], None] = lambda _: None) -> Saved:
    """Download an object to `path`, resuming a partial download.

    `check` gets the complete partial file and raises CommandFailed if it is not acceptable; the file is then removed.
    Raises CommandFailed also for a wrong SHA-256 and if `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part, resumed_at = _fetch(client, url, path)
        digest = _digest(part)
        _compare(part, path, digest)
        _check_part(part, check)
        saved = Saved(path, part.stat().st_size, digest, resumed_at)
        os.replace(part, path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror or error}.") from None
    return saved


def _fetch(client: Client, url: str, path: Path) -> tuple[Path, int]:
    """Return the complete partial file, and its size before the last request; retry up to three times."""
    waits = iter(_WAITS_S)
    while True:
        try:
            return _once(client, url, path)
        except (Broken, Busy) as error:
            if (wait_s := next(waits, None)) is None:
                raise
            warn(f"{error} Going on in {wait_s:g} s.")
            time.sleep(wait_s)


def _once(client: Client, url: str, path: Path) -> tuple[Path, int]:
    """Make one request for the missing bytes; return the complete file and its size before the request.

    Raises `Broken` if the connection ends early; what came is kept.
    """
    old = next((each for each in _parts(path) if each.stat().st_size and _part_tag(each, path) != _NO_TAG), None)
    rest = {"range": f"bytes={old.stat().st_size}-", "if-range": f'"{_part_tag(old, path)}"'} if old else {}
    with client.stream(url, rest) as answer:
        if old and answer.status_code == _NO_MORE_BYTES:
            return old, old.stat().st_size  # the partial file is complete already
        is_rest = answer.status_code == _PART_OF_IT
        part = old if old and is_rest else path.with_name(f"{path.name}.{_tag(answer)}.part")
        for other in _parts(path):
            if other != old or not is_rest:
                other.unlink()
        start = part.stat().st_size if is_rest else 0
        length = answer.headers.get("content-length")
        total = start + int(length) if length else None
        with part.open("ab" if is_rest else "wb") as file, _bar(path.name, start, total) as advance:
            for chunk in answer.iter_raw(_CHUNK_BYTES):
                file.write(chunk)
                advance(len(chunk))
    if total is not None and part.stat().st_size < total:
        raise Broken(f"{part.stat().st_size} of {total} bytes came.")
    return part, start


@contextmanager
def _bar(name: str, start: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal; yield a function that adds bytes to it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(name, total=total, completed=start)
        yield lambda n: progress.advance(task, n)


def _parts(path: Path) -> list[Path]:
    """Return the partial files of earlier attempts, newest first."""
    found = [each for each in path.parent.glob("*.part") if each.name.startswith(path.name) and _part_tag(each, path)]
    return sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)


def _part_tag(part: Path, path: Path) -> str:
    match = _PART.fullmatch(part.name.removeprefix(path.name))
    return match.group(1) if match else ""


def _tag(answer: Response) -> str:
    """Return a response's ETag if it is valid in a file name, else `untagged`."""
    tag = answer.headers.get("etag", "").strip('"')
    return tag if _PART.fullmatch(f".{tag}.part") else _NO_TAG


def _digest(part: Path) -> str:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(part: Path, path: Path, digest: str) -> None:
    """Compare a file with its ETag if that is a SHA-256, as in our API but not in S3; raise CommandFailed."""
    tag = _part_tag(part, path)
    if _DIGEST.fullmatch(tag) and tag != digest:
        part.unlink()
        raise CommandFailed("What came has another SHA-256 than the service says, and was removed; try again.")


def _check_part(part: Path, check: Callable[[Path], None]) -> None:
    try:
        check(part)
    except CommandFailed:
        part.unlink(missing_ok=True)
        raise
