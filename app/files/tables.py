"""Convert Parquet, Arrow and JSON arrays to JSON lines during upload.

A child process without secrets decodes them, with limits on memory and CPU time, because its libraries parse untrusted
bytes.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from threading import BoundedSemaphore
from typing import IO, BinaryIO, cast

from app.errors import InvalidRequest, TooLarge, Unavailable
from app.files.table_reader import CPU_S, REFUSED, Kind
from app.ops.processes import keyless_environment, python
from spard.data.jsonl import UTF8_BOM

ENDINGS = (".json", ".parquet", ".arrow", ".feather")  # accepted file name endings, besides .jsonl
_HEAD, _CHUNK = 64, 1 << 20
_FILE_BYTES = 1 << 30  # of one file to decode
_MEMORY_BYTES = 2 << 30  # of the process, including its libraries
_MAGIC: dict[bytes, Kind] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow_stream"}
_NAMES: dict[Kind, str] = {
    "parquet": "a Parquet file",
    "arrow": "an Arrow file",
    "arrow_stream": "an Arrow stream",
    "array": "one JSON array",
}
_FIXED = {"ARROW_DEFAULT_MEMORY_POOL": "system", "ARROW_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
_AS_LINES = "write it as JSON lines: Dataset.to_json(FILE), or DataFrame.to_json(FILE, orient='records', lines=True)"
_AT_ONCE = BoundedSemaphore(2)  # per API process, because each may use `_MEMORY_BYTES`
_WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Lines:
    """A file's rows as bytes of JSON lines, and its original kind; None if it was JSON lines or is unknown."""

    chunks: Iterator[bytes]
    was: str | None


def read_lines(chunks: Iterable[bytes], name: str, most_bytes: int, line_bytes: int) -> Lines:
    """Return a file's rows as JSON lines.

    `name` decides if a leading "[" is an array or a mistake. At most `most_bytes` of a file to decode are read, and an
    entry of an array may have `line_bytes`. Faults are raised while the lines are read: `InvalidRequest` or `TooLarge`.
    """
    rest = iter(chunks)
    head = b""
    # A client may send its first bytes one by one; the kind is decided only after enough of them.
    while len(head) < _HEAD and (chunk := next(rest, None)) is not None:
        head += chunk
    whole = chain([head], rest) if head else rest
    kind = _kind(head, name)
    if kind is None:
        return Lines(whole, None)
    return Lines(_decode_file(kind, whole, min(most_bytes, _FILE_BYTES), line_bytes), _NAMES[kind])


def _kind(head: bytes, name: str) -> Kind | None:
    is_array = name.lower().endswith(".json") and head.removeprefix(UTF8_BOM).lstrip().startswith(b"[")
    return "array" if is_array else next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def _decode_file(kind: Kind, chunks: Iterable[bytes], most_bytes: int, line_bytes: int) -> Iterator[bytes]:
    """Copy the file to disk, because its end is read first, and yield the lines that the child process writes."""
    with tempfile.TemporaryFile() as file:
        for chunk in chunks:
            file.write(chunk)
            if file.tell() > most_bytes:
                message = f"The file is {_NAMES[kind]} of more than {most_bytes} bytes; {_AS_LINES}."
                raise TooLarge(message, code="file_too_large", param="file")
        file.seek(0)
        with _place(), _reader(kind, file, line_bytes) as process:
            stdout, stderr = cast(IO[bytes], process.stdout), cast(IO[bytes], process.stderr)
            while lines := stdout.read(_CHUNK):
                yield lines
            told = stderr.read(_CHUNK)
            # Only now: the exit status tells if the lines are all of the file.
            if process.wait():
                raise _refusal(kind, process.returncode, told)


@contextmanager
def _place() -> Iterator[None]:
    if not _AT_ONCE.acquire(timeout=_WAIT_S):
        raise Unavailable("Other files are being decoded; try again.")
    try:
        yield
    finally:
        _AT_ONCE.release()


@contextmanager
def _reader(kind: Kind, file: BinaryIO, line_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that reads the file from standard input, and kill it at the end of the block."""
    process = subprocess.Popen(  # noqa: S603 - the command is ours
        python("app.files.table_reader", kind, str(_MEMORY_BYTES), str(line_bytes)),
        stdin=file,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=keyless_environment(_FIXED),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            cast(IO[bytes], pipe).close()


def _refusal(kind: Kind, status: int, told: bytes) -> InvalidRequest | TooLarge:
    """Return why a file was not decoded: the process's reason, or a limit that it exceeded."""
    if status == REFUSED:
        with suppress(ValueError, TypeError, KeyError):
            reason = str(json.loads(told)["reason"])[:1000]
            message = f"The file is {_NAMES[kind]} and cannot be taken: {reason}."
            return InvalidRequest(message, code="unsupported_format", param="file")
    message = (
        f"The file is {_NAMES[kind]} that is broken, or that takes more than {_MEMORY_BYTES >> 20} MiB of memory or "
        f"{CPU_S} s to decode: write it in smaller row groups, or {_AS_LINES}."
    )
    return TooLarge(message, code="file_too_large", param="file")
