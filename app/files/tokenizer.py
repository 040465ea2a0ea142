"""Load a base model's tokenizer and chat template without torch, with the interface that `spard.data.chat` needs.

It behaves like transformers on the same files; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import AddedToken, Tokenizer

from app.errors import InvalidState
from spard.config import MAX_SEQ_LENGTH
from spard.data.chat import fix_template_arguments, set_plain_template
from spard.models.folder.check import read_template

if TYPE_CHECKING:  # the counting processes need no database library
    from app.db.tables import BaseModelEntry

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_AT_ONCE = 16  # texts tokenized per call: their results stay in the processor's cache
_FILES = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
]


class LightTokenizer:
    """A tokenizer read from `tokenizer.json`, the special tokens and the chat template of a model's folder."""

    def __init__(self, folder: Path) -> None:
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self._tokens = _tokens(folder / "tokenizer.json")
        # A tokenizer file may contain truncation and padding settings, which would change the counts.
        self._tokens.no_truncation()
        self._tokens.no_padding()
        self._special = {name: _text(settings[name]) for name in _NAMED if settings.get(name)}
        self.chat_template: str | Mapping[str, str] | None = read_template(folder, settings)
        config = _json(folder / "config.json")
        inner = config | (config.get("text_config") or {})
        self._positions = int(inner.get("max_position_embeddings") or MAX_SEQ_LENGTH)
        self.eos_token, self.pad_token = self._special.get("eos_token"), self._special.get("pad_token")
        self.stated_ends = _stated_ends(folder, inner)
        set_plain_template(self)

    def __call__(
        self, texts: Sequence[str], *, return_offsets_mapping: bool = False, **ignored: Any
    ) -> dict[str, list[Any]]:
        """Return the token ids of each text and, if requested, each token's character offsets; no special tokens."""
        ids, offsets = list[list[int]](), list[list[tuple[int, int]]]()
        encode = self._tokens.encode_batch if return_offsets_mapping else self._tokens.encode_batch_fast
        for start in range(0, len(texts), _AT_ONCE):
            found = encode(list(texts[start : start + _AT_ONCE]), add_special_tokens=False)
            ids += [each.ids for each in found]
            if return_offsets_mapping:
                offsets += [each.offsets for each in found]
        return {"input_ids": ids, "offset_mapping": offsets}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens, which chat templates read."""
        return dict(self._special)

    def sequence_limit(self, asked: int | None) -> int:
        """Return the length limit of a row in tokens: as requested, but at most the model's number of positions."""
        return min(self._positions, asked or MAX_SEQ_LENGTH)

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token; None if the model has none."""
        return self._tokens.token_to_id(self.pad_token) if self.pad_token else None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token; None if the model has none."""
        return self._tokens.token_to_id(self.eos_token) if self.eos_token else None

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens that are in the vocabulary."""
        found = (self._tokens.token_to_id(token) for token in self._special.values())
        return [token_id for token_id in found if token_id is not None]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that were added to the vocabulary, by id."""
        return self._tokens.get_added_tokens_decoder()

    def __contains__(self, token: str) -> bool:
        """Return True if the vocabulary has the token."""
        return self._tokens.token_to_id(token) is not None

    @property
    def start(self) -> list[int]:
        """The token that the tokenizer puts before every text, as a list; empty if there is none."""
        found: list[int] = self._tokens.encode("").ids[:1]
        return found

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; empty if no token has this id."""
        return self._tokens.id_to_token(token_id) or ""

    def piece(self, token_id: int) -> str:
        """Return a token as readable text."""
        text: str = self._tokens.decode([token_id], skip_special_tokens=False)
        return text


def open_tokenizer(entry: BaseModelEntry) -> LightTokenizer:
    """Return the tokenizer of a base model, whose conversations are rendered with the entry's template arguments.

    Raises `InvalidState` if its files are absent or not supported.
    """
    try:
        return read_tokenizer(tokenizer_folder(entry), entry.template_arguments)
    except (ValueError, KeyError, TypeError):
        raise unavailable(entry) from None


def read_tokenizer(folder: Path, template_arguments: Mapping[str, object] | None) -> LightTokenizer:
    """Return the tokenizer in a folder, with these arguments fixed for its chat template.

    Raises `OSError`, `ValueError`, `KeyError` or `TypeError` for files that cannot be read.
    """
    tokenizer = LightTokenizer(folder)
    fix_template_arguments(tokenizer, template_arguments or {})
    return tokenizer


def tokenizer_folder(entry: BaseModelEntry) -> Path:
    """Return the folder with a base model's tokenizer; raise `InvalidState` if it is not on this machine."""
    folder = Path(entry.source)
    try:
        if not folder.is_dir():
            folder = Path(
                snapshot_download(entry.source, revision=entry.revision, allow_patterns=_FILES, local_files_only=True)
            )
        if (folder / "tokenizer.json").is_file():
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass
    raise unavailable(entry)


def unavailable(entry: BaseModelEntry) -> InvalidState:
    """Return the error for a base model whose tokenizer cannot be read here."""
    message = (
        f"The tokenizer of {entry.alias} is not on the machine that serves the API, or is not of a kind that it reads."
    )
    return InvalidState(message, code="tokenizer_unavailable", param="model")


def _tokens(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path.name} is not read by this version of tokenizers") from error


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _stated_ends(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a reply, from the model's generation config or, without one, from its config."""
    own = _json(folder / "generation_config.json")
    found = own.get("eos_token_id") if own else config.get("eos_token_id")
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]
