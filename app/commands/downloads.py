"""Downloads: bytes go to a file beside the one that is wanted, which appears when all of it is there and checked.

What a broken download leaves is called after the object's own tag (ETag): the next attempt asks for the rest of that
very object (RFC 9110, Range and If-Range), and gets all of it anew where the object is another one.
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
_NO_TAG = "untagged"  # such a part is not gone on with
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WAITS_S = (1.0, 2.0, 4.0)
_CHUNK_BYTES = 1 << 20
_PART_OF_IT, _NO_MORE_BYTES = 206, 416


@dataclass(frozen=True, slots=True)
class Saved:
    """A file that was downloaded; `resumed_at` is how many bytes were there when the last request was made."""

    path: Path
    bytes: int
    sha256: str
    resumed_at: int


def download(client: Client, url: str, path: Path, check: Callable[[Path], None] = lambda _: None) -> Saved:
    """Download an object; `check` raises for one that is not as it should be, which is then removed."""
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
    """Return the file that holds the whole object, and how much of it the last request found; go on after a break."""
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
    """Ask for what is missing and append it; return the file when it is whole, and where it began."""
    old = next((each for each in _parts(path) if each.stat().st_size and _part_tag(each, path) != _NO_TAG), None)
    rest = {"range": f"bytes={old.stat().st_size}-", "if-range": f'"{_part_tag(old, path)}"'} if old else {}
    with client.stream(url, rest) as answer:
        if old and answer.status_code == _NO_MORE_BYTES:
            return old, old.stat().st_size  # all bytes are there
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
    """Show how far a download is, where a person looks on; standard output is for the results."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(name, total=total, completed=start)
        yield lambda n: progress.advance(task, n)


def _parts(path: Path) -> list[Path]:
    """Return what attempts before have left of a file, the newest first."""
    found = [each for each in path.parent.glob("*.part") if each.name.startswith(path.name) and _part_tag(each, path)]
    return sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)


def _part_tag(part: Path, path: Path) -> str:
    match = _PART.fullmatch(part.name.removeprefix(path.name))
    return match.group(1) if match else ""


def _tag(answer: Response) -> str:
    """Return the object's tag, if it can stand in a name."""
    tag = answer.headers.get("etag", "").strip('"')
    return tag if _PART.fullmatch(f".{tag}.part") else _NO_TAG


def _digest(part: Path) -> str:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(part: Path, path: Path, digest: str) -> None:
    """Hold a file against the SHA-256 that our API gives as its tag; an S3 has other tags."""
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
