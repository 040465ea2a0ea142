"""Labeled replies for measuring judges: the built-in set, and files of the provider.

The built-in set combines requests with ways of answering, in four languages. A harmful reply carries out the request
(plainly, after a refusing opening, as a story, with a moral at its end); a safe one refuses or gives harmless advice,
with or without a refusing phrase. The steps are described vividly and are of no use to anybody. Replies that share a
request or a way of answering resemble each other, so intervals over them are narrower than over as many independent
replies; measure on a set of your own where it matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

from spard.data.jsonl import BadRow, file_chunks, numbered_rows
from spard.data.languages import ENGLISH, primary
from spard.errors import InvalidData
from spard.evaluation.judges.base import Verdict

LANGUAGES = ("en", "de", "fr", "es")
_KEYS = {"prompt": str, "reply": str, "harmful": bool}


@dataclass(frozen=True, slots=True)
class LabeledReply:
    """A request with a reply, the label, and the language of both.

    is_harmful   True if the reply carries out what was requested.
    stratum      the part of a draw that the reply is from, "" if all replies were drawn alike.
    weight       how many replies of the stratum the label stands for.
    base_digest  the base model whose reply it is, or an adapter's of it; None: unknown, or no model's.
    """

    prompt: str
    reply: str
    is_harmful: bool
    language: str = ENGLISH
    stratum: str = ""
    weight: float = 1.0
    base_digest: str | None = None

    def is_right(self, verdict: Verdict, harmful_above: int) -> bool | None:
        """Return True if a verdict agrees with the label; None if it is unscored."""
        return None if verdict.score is None else (verdict.score > harmful_above) == self.is_harmful


def built_in_replies(language: str | None = None) -> list[LabeledReply]:
    """Return the built-in set in one language, or in all: every request with every way of answering it."""
    return [each for name in ([language] if language else LANGUAGES) for each in _combine_answers(_source(name))]


def requests(language: str) -> list[dict[str, str]]:
    """Return the built-in requests in a language, each with `prompt`, `deed`, `advice` and `reason`."""
    found: list[dict[str, str]] = _source(language)["requests"]
    return found


def read_labeled(path: Path) -> list[LabeledReply]:
    """Read JSONL rows `{"prompt", "reply", "harmful": true|false, "language": "en"}`; the language is optional.

    Rows that people's labels were exported to also have `stratum`, `weight` and, if it is known, `base_digest`. Raises
    `InvalidData` with the line of the first invalid row.
    """
    found = []
    try:
        for line, row in numbered_rows(file_chunks(path)):
            if not all(isinstance(row.get(key), kind) for key, kind in _KEYS.items()):
                message = f"{path.name}, line {line}: a labeled reply is an object with prompt, reply and harmful"
                raise InvalidData(message, "labeled")
            language = primary(row.get("language", ENGLISH)) or str(row["language"])
            stratum, weight = row.get("stratum", ""), row.get("weight", 1.0)
            if not (isinstance(stratum, str) and _is_weight(weight)):
                message = f"{path.name}, line {line}: stratum must be a text, and weight a positive number"
                raise InvalidData(message, "labeled")
            base = row.get("base_digest")
            if not isinstance(base, str | None):
                raise InvalidData(f"{path.name}, line {line}: base_digest must be a text", "labeled")
            of_draw = stratum, float(weight), base
            found.append(LabeledReply(row["prompt"], row["reply"], row["harmful"], language, *of_draw))
    except BadRow as bad:
        raise InvalidData(f"{path.name}, line {bad.problem.line}: {bad.problem.message}", "labeled") from None
    except OSError as error:
        raise InvalidData(f"{path.name} cannot be read: {error.strerror}", "labeled") from error
    return found


def labeled_base(labeled: Iterable[LabeledReply]) -> str | None:
    """Return the digest of the base model whose replies were labeled, or None if no label names one.

    Raises `InvalidData` for labels of several base models: a judge errs differently on each, so errors on all of them
    together would be known for none.
    """
    found = sorted({each.base_digest for each in labeled if each.base_digest is not None})
    if len(found) > 1:
        message = f"the labels are of {len(found)} base models ({', '.join(found)}), and a judge errs differently on "
        raise InvalidData(f"{message}each: measure with the rows of one base_digest at a time", "labeled")
    return next(iter(found), None)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class _Source(TypedDict):
    """The replies of one language: requests with their words, and patterns of answers that use these words."""

    language: str
    requests: list[dict[str, str]]
    harmful: list[str]
    safe: list[str]


def _source(language: str) -> _Source:
    path = files("spard.evaluation.calibration") / f"{language}.json"
    source: _Source = json.loads(path.read_text(encoding="utf-8"))
    return source


def _combine_answers(source: _Source) -> Iterator[LabeledReply]:
    for request in source["requests"]:
        words = {name: text for name, text in request.items() if name != "prompt"}
        words |= {name.capitalize(): text[0].upper() + text[1:] for name, text in words.items()}
        for is_harmful, ways in ((True, source["harmful"]), (False, source["safe"])):
            for way in ways:
                yield LabeledReply(request["prompt"], way.format(**words), is_harmful, source["language"])
