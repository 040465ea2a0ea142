"""Compares a tokenizer's ids with the rows of the embeddings: an id past the end cannot be looked up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spard.models.folder.finding import Finding, note
from spard.models.folder.headers import all_tensors
from spard.models.folder.reading import read_object, whole_number

_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_LONGEST = 60  # maximum characters of a quoted token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids by token, the set of control tokens, and the tokens with a role such as `eos_token`."""

    ids: Mapping[str, int]
    control: frozenset[str]
    roles: Mapping[str, str]


def vocabulary_findings(vocabulary: Vocabulary, rows: int) -> Iterator[Finding]:
    """Yield the findings of comparing a vocabulary with embeddings of `rows` rows.

    Control tokens past the embeddings are only noted: texts that contain them are spelled out, and padding is masked.
    """
    beyond = sorted((token_id, token) for token, token_id in vocabulary.ids.items() if token_id >= rows)
    plain = [each for each in beyond if each[1] not in vocabulary.control]
    if plain:
        token_id, token = plain[0]
        more = f", as have {len(plain) - 1} more" if plain[1:] else ""
        yield Finding(
            "tokens_past_embeddings",
            f"its tokenizer has the token {token[:_LONGEST]!r} with id {token_id}{more}, and the weights have "
            f"embeddings for {rows} ids only: call resize_token_embeddings and save the model, or remove the tokens",
        )
    roles = {name: token for name, token in vocabulary.roles.items() if vocabulary.ids.get(token, 0) >= rows}
    for name in ("eos_token", "bos_token"):
        if name in roles:
            what = f"its {name} {roles[name][:_LONGEST]!r} has id {vocabulary.ids[roles[name]]}"
            yield Finding("tokens_past_embeddings", f"{what}, and the weights have embeddings for {rows} ids only")
    if "pad_token" in roles:
        what = f"its padding token {roles['pad_token'][:_LONGEST]!r} lies past the embeddings"
        yield note("padding_past_embeddings", f"{what}: its end token pads instead, which is masked")
    if others := [token for _, token in beyond if token in vocabulary.control and token not in roles.values()]:
        what = f"its control token {others[0][:_LONGEST]!r} lies past the embeddings"
        more = f", as do {len(others) - 1} more" if others[1:] else ""
        yield note("control_past_embeddings", f"{what}{more}: in texts it is spelled out, and never written")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of `tokenizer.json` with the tokens that other files add."""
    tokens, settings = read_object(folder, "tokenizer.json"), read_object(folder, "tokenizer_config.json")
    ids = dict(_model_ids(tokens.get("model")))
    added = _read_added_tokens(tokens.get("added_tokens")) + _decoder(settings.get("added_tokens_decoder"))
    ids |= {token: token_id for token, token_id, _ in added}
    own = read_object(folder, "added_tokens.json").items()
    ids |= {token: number for token, value in own if (number := whole_number(value)) is not None and token not in ids}
    special = read_object(folder, "special_tokens_map.json") | settings
    roles = {
        name: text
        for name in ("eos_token", "bos_token", "pad_token", "unk_token")
        if (text := _text(special.get(name)))
    }
    return Vocabulary(ids, frozenset(token for token, _, is_control in added if is_control), roles)


def embedding_rows(folder: Path) -> int | None:
    """Return the number of rows of the embeddings; None if the headers do not show it."""
    found = [
        tensor["shape"] for name, tensor in all_tensors(folder) if name.endswith(_EMBEDDINGS) and "vis" not in name
    ]
    return next((int(shape[0]) for shape in found if len(shape) == 2), None)


def unknown_id(ids: Iterable[int], rows: int) -> int | None:
    """Return the largest of the token ids if it is past the `rows` embeddings, else None."""
    largest = max(ids, default=0)
    return largest if largest >= rows else None


def _model_ids(model: object) -> Iterator[tuple[str, int]]:
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        yield from (
            (token, number) for token, value in vocabulary.items() if (number := whole_number(value)) is not None
        )
    elif isinstance(vocabulary, list):  # Unigram: (token, score) in the order of ids
        yield from ((str(each[0]), i) for i, each in enumerate(vocabulary) if isinstance(each, list) and each)


def _read_added_tokens(found: object) -> list[tuple[str, int, bool]]:
    tokens = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [
        (str(each["content"]), number, each.get("special") is True)
        for each in tokens
        if "content" in each and (number := whole_number(each.get("id"))) is not None
    ]


def _decoder(found: object) -> list[tuple[str, int, bool]]:
    pairs = found.items() if isinstance(found, Mapping) else ()
    return _read_added_tokens(
        [{**each, "id": int(key)} for key, each in pairs if key.isdecimal() and isinstance(each, Mapping)]
    )


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None
