"""The check of a base model's folder, shared by the service, `spard check-model` and the loader of base models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from spard.models.folder.configuration import configuration_findings
from spard.models.folder.decoding import decoding_findings
from spard.models.folder.finding import Finding, FolderFault
from spard.models.folder.layout import layout_faults
from spard.models.folder.reading import oversized_files, read_object
from spard.models.folder.templates import template_findings
from spard.models.folder.vocabulary import embedding_rows, read_vocabulary, vocabulary_findings

_READ_BY_LOADERS = (
    *("generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)


def findings(folder: Path) -> list[Finding]:
    """Return all findings in a folder's files, stopping at a fault that hides the rest.

    Files above a size limit are not read, and no chat template is rendered.
    """
    found = list[Finding]()
    for look in (
        oversized_files,
        layout_faults,
        _configuration,
        _files,
        template_findings,
        decoding_findings,
        _vocabulary,
    ):
        found += _all(look, folder)
        # Later checks assume the earlier ones have passed, e.g. that files are small enough to read.
        if any(each.is_fault for each in found):
            break
    return found


def fault(folder: Path) -> Finding | None:
    """Return the first fault of a folder, or None."""
    return next((each for each in findings(folder) if each.is_fault), None)


def notes(folder: Path) -> list[str]:
    """Return the findings that are no faults but that a provider should know, as sentences."""
    return [each.sentence for each in findings(folder) if not each.is_fault]


def _all(look: Callable[[Path], Iterator[Finding]], folder: Path) -> Iterator[Finding]:
    try:
        yield from look(folder)
    except FolderFault as error:
        yield error.finding
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Finding("unreadable", f"its files cannot be read ({type(error).__name__}): copy or download them again")


def _configuration(folder: Path) -> Iterator[Finding]:
    yield from configuration_findings(folder, read_object(folder, "config.json"))


def _files(folder: Path) -> Iterator[Finding]:
    """Try to parse the other JSON files that loaders read; a broken one raises `FolderFault`."""
    for name in _READ_BY_LOADERS:
        read_object(folder, name)
    return iter(())


def _vocabulary(folder: Path) -> Iterator[Finding]:
    rows = embedding_rows(folder)
    if rows is not None:
        yield from vocabulary_findings(read_vocabulary(folder), rows)
