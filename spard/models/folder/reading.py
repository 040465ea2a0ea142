"""Reads files of a folder with size limits and precise errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spard.models.folder.finding import Finding, FolderFault

_MB = 1 << 20
_TOKENIZER, _INDEX, _TEMPLATE, _OTHER = 256 * _MB, 128 * _MB, 2 * _MB, 16 * _MB
_LARGE = {
    "tokenizer.json": _TOKENIZER,
    "vocab.json": _TOKENIZER,
    "merges.txt": _TOKENIZER,
    "tokenizer.model": _TOKENIZER,
    "model.safetensors.index.json": _INDEX,
}
_READ = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt", "tokenizer.model")


def oversized_files(folder: Path) -> Iterator[Finding]:
    """Yield a fault for each file that loaders read whole and that is larger than any real one."""
    for path in sorted({path for pattern in _READ for path in folder.glob(pattern) if path.is_file()}):
        most = _LARGE.get(path.name, _TEMPLATE if path.suffix == ".jinja" else _OTHER)
        if (size := path.stat().st_size) > most:
            sentence = (
                f"{path.name} has {size / _MB:.0f} MB, and no more than {most // _MB} are read: give the real file"
            )
            yield Finding("file_too_large", sentence)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no file; raise `FolderFault` for anything else."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _broken_file(name, f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise _broken_file(name, "it is not UTF-8") from None
    except (ValueError, RecursionError):
        raise _broken_file(name, "it is nested too deeply, or has a number that cannot be read") from None
    except OSError as error:
        raise _broken_file(name, error.strerror or "it cannot be read") from None
    if not isinstance(found, dict):
        raise _broken_file(name, "it holds no JSON object")
    return found


def whole_number(value: object) -> int | None:
    """Return a JSON value as an integer; None for anything else, true and false included."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _broken_file(name: str, why: str) -> FolderFault:
    return FolderFault("broken_json", f"{name} is broken ({why}): copy or download the file again")
