"""What will be trained: rows as the base model's template renders them, token by token, with the loss mask."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from sqlalchemy.orm import Session

from app.catalog.heldout import read_lines
from app.errors import InvalidRequest, InvalidState
from app.files import service
from app.files.repeats import digest
from app.files.schemas import AuditOverlap, Overlap, Preview, PreviewRow, PreviewToken, TokenCounts
from app.files.strict_json import BadJson, parse
from app.files.tokenizer import LightTokenizer, open_tokenizer
from app.models import BaseModelEntry, Corpus, File
from app.storage import Storage
from spard.chat import NO_LOSS, encode_all
from spard.errors import InvalidData
from spard.overlap import find_leaks
from spard.rows import example, prompt_text

EXAMINED = 10_000  # rows of a file that are counted while the client waits
_ANY_LENGTH = 2**31
_SHOWN = 4096  # tokens of a row
_LISTED = 100  # lines
_MAX_CHARS, _MAX_TURNS = 200_000, 100  # a template is rendered once for each turn
_BANDS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)


def model_entry(session: Session, alias: str) -> BaseModelEntry:
    """The base model of this name."""
    entry = session.get(BaseModelEntry, alias)
    if entry is None:
        raise InvalidRequest(f"The model {alias[:128]!r} does not exist.", code="model_not_found", param="model")
    return entry


def preview(storage: Storage, file: File, entry: BaseModelEntry, n: int) -> Preview:
    """The first n rows as the model will see them in training."""
    _check_ready(file)
    tokenizer = open_tokenizer(entry)
    rows = [_row(tokenizer, line, text) for line, text in islice(_lines(storage, file), n)]
    return Preview(file_id=file.id, model=entry.alias, data=rows)


def token_counts(storage: Storage, file: File, entry: BaseModelEntry, max_seq_length: int | None) -> TokenCounts:
    """How long the file's first rows are for a model, and which of them a job would refuse."""
    _check_ready(file)
    tokenizer, found, skipped = open_tokenizer(entry), [], 0
    for line, text in islice(_lines(storage, file), EXAMINED):
        try:
            ids, labels = _encoded(tokenizer, line, text)
        except InvalidData:
            skipped += 1
            continue
        found.append((line, len(ids), sum(label != NO_LOSS for label in labels)))
    lengths, limit = [length for _, length, _ in found], tokenizer.sequence_limit(max_seq_length)
    long = [line for line, length, _ in found if length > limit]
    untrained = [line for line, _, learnt in found if not learnt]
    bands = Counter(next((band for band in _BANDS if length <= band), None) for length in lengths)
    return TokenCounts(
        model=entry.alias,
        rows=len(found),
        rows_not_rendered=skipped,
        total=sum(lengths),
        trained=sum(learnt for _, _, learnt in found),
        min=min(lengths, default=0),
        max=max(lengths, default=0),
        limit=limit,
        rows_over_limit=len(long),
        lines_over_limit=long[:_LISTED],
        histogram={("more" if band is None else str(band)): bands[band] for band in (*_BANDS, None) if bands[band]},
        rows_without_loss=len(untrained),
        lines_without_loss=untrained[:_LISTED],
    )


def overlap(storage: Storage, file: File, other: File) -> Overlap:
    """Which of the file's first rows stand in another file's first rows too."""
    known = {_digest(text) for _, text in islice(_lines(storage, other), EXAMINED)}
    lines = [line for line, text in islice(_lines(storage, file), EXAMINED) if _digest(text) in known]
    return Overlap(validation_file=other.id, rows=len(lines), lines=lines[:_LISTED])


def audit_overlap(storage: Storage, file: File, audited: Sequence[Corpus]) -> AuditOverlap:
    """Which of the file's first rows hold prompts that adapters are measured with: for the provider's eyes alone."""
    rows = [(line, _asked(line, text)) for line, text in islice(_lines(storage, file), EXAMINED)]
    suites = {
        corpus.id: [str(row["prompt"]) for row in read_lines(storage.chunks(corpus.storage_key))] for corpus in audited
    }
    leaks = find_leaks(suites, {file.id: [asked for _, asked in rows]})
    lines = sorted({rows[leak.row][0] for leak in leaks})
    return AuditOverlap(prompts=len(leaks), lines=lines[:_LISTED])


def _asked(line: int, text: str) -> str:
    """What the user says in a row; nothing in one that is no training row."""
    try:
        return prompt_text(example(json.loads(text), line))
    except (InvalidData, ValueError, TypeError, AttributeError):
        return ""


def _check_ready(file: File) -> None:
    if file.status != "processed" or file.purpose != service.FINE_TUNE:
        message = f"{file.id} cannot be trained on: {file.status_details or 'its purpose is ' + file.purpose}"
        raise InvalidState(message, code="invalid_training_file", param="file_id")


def _row(tokenizer: LightTokenizer, line: int, text: str) -> PreviewRow:
    try:
        ids, labels = _encoded(tokenizer, line, text)
    except InvalidData as error:
        return PreviewRow(line=line, error=error.message)
    pairs = list(zip(ids, labels, strict=True))
    return PreviewRow(
        line=line,
        n_tokens=len(pairs),
        n_trained=sum(label != NO_LOSS for label in labels),
        tokens=[
            PreviewToken(id=token_id, text=tokenizer.piece(token_id), trained=label != NO_LOSS)
            for token_id, label in pairs[:_SHOWN]
        ],
    )


def _encoded(tokenizer: LightTokenizer, line: int, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = example(json.loads(text), line)
    if len(text) > _MAX_CHARS or len(row.messages) > _MAX_TURNS:
        raise InvalidData(f"line {line} has more than {_MAX_CHARS} characters or {_MAX_TURNS} turns: not rendered here")
    (encoded,) = encode_all(tokenizer, [row], _ANY_LENGTH)
    return encoded.ids, encoded.labels


def _lines(storage: Storage, file: File) -> Iterator[tuple[int, str]]:
    """The rows with their line numbers; empty lines are none."""
    with storage.open(file.storage_key) as lines:
        for line, raw in enumerate(lines, start=1):
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
            if text:
                yield line, text


def _digest(text: str) -> int:
    """The same for rows that say the same; what is no JSON is taken as it stands."""
    try:
        return digest(json.loads(text))
    except (ValueError, RecursionError):
        return digest(text)


def lines_of(storage: Storage, file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows as they were uploaded, valid or not, that are JSON objects."""
    for line, text in _lines(storage, file):
        try:
            row = parse(text)
        except BadJson:
            row = None
        if not isinstance(row, dict):
            raise InvalidState(f"Line {line} is not a JSON object.", code="not_convertible", param="file_id")
        yield line, row
