"""Explain our words and the error codes: for the pages under /help, for links to them, and for docs/.

terms.toml        word -> meaning, and words that we do not use for the same; docs/glossary.md is made from it
error_codes.toml  code -> cause and cure, by where it appears; docs/error-codes.md is made from it
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from markupsafe import Markup, escape

TERMS_PLACE, CODES_PLACE = "/help/terms", "/help/errors"
# Where codes appear that the service gives; those of the laboratory's own commands are in docs/error-codes.md only.
PLACES = {"requests": "a request", "jobs": "a job", "rows": "a row"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]*)(#[^)]*)?\)")
_ANCHOR = Markup('<a class="term" href="{}#{}" title="{}">{}</a>')
_QUOTED = re.compile(r"`([^`\n]+)`")

Table = Mapping[str, Mapping[str, tuple[str, str]]]
Linked = Callable[[str, str], Markup]  # (name, words shown) -> what stands for them


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the glossary; `name` may have several words between commas."""

    name: str
    meaning: str
    instead_of: str

    @property
    def anchors(self) -> dict[str, str]:
        """The anchor on the page for each word of the name."""
        return {word: anchor(word) for word in self.name.split(", ")}


@dataclass(frozen=True, slots=True)
class Cause:
    """What an error code means in one of the places where it appears."""

    place: str  # a key of PLACES
    cause: str
    cure: str


def read_table(name: str) -> Table:
    """Return one of the two tables: sections of names with two texts each."""
    tables = tomllib.loads((files("app.help") / name).read_text(encoding="utf-8"))
    return {
        section: {key: (first, second) for key, (first, second) in rows.items()} for section, rows in tables.items()
    }


@cache
def sections() -> Mapping[str, tuple[Term, ...]]:
    """Return the rows of the glossary by section."""
    table = read_table("terms.toml")
    return {section: tuple(Term(name, *texts) for name, texts in rows.items()) for section, rows in table.items()}


@cache
def terms() -> Mapping[str, Term]:
    """Return the rows of the glossary by the anchors of their words."""
    return {mark: term for rows in sections().values() for term in rows for mark in term.anchors.values()}


@cache
def codes() -> Mapping[str, tuple[Cause, ...]]:
    """Return what each error code of the service means, in alphabetical order of the codes."""
    table = read_table("error_codes.toml")
    found: dict[str, tuple[Cause, ...]] = {}
    for place in PLACES:
        for code, texts in table[place].items():
            found[code] = (*found.get(code, ()), Cause(place, *texts))
    return dict(sorted(found.items()))


def job_cure(code: str) -> str:
    """Return what to do about a job that failed with this code, without marks of Markdown; "" for an unknown code."""
    return next((plain_text(each.cure) for each in codes().get(code, ()) if each.place == "jobs"), "")


@cache
def anchor(word: str) -> str:
    """Return the anchor of a word: `Wilson interval` has `wilson-interval`."""
    return re.sub("[^a-z0-9]+", "-", word.lower()).strip("-")


def plain_text(text: str) -> str:
    """Return a text of the tables without the marks of Markdown."""
    return _LINK.sub(r"\1", text).replace("`", "")


def render_markdown(text: str) -> Markup:
    """Return a text of the tables as HTML.

    In place of a link to a page of docs/ it has the page's name, because the service does not serve docs/.
    """

    def name_page(found: re.Match[str]) -> str:
        words, file = found[1], found[2]
        return f'{words} <span class="soft">(docs/{file})</span>' if file else words

    linked = _LINK.sub(name_page, str(escape(text)))
    return Markup(_QUOTED.sub(r"<code>\1</code>", linked))  # noqa: S704 - it is escaped


# Pages link the same words again and again; `typed` tells escaped words from the same text that is not.
_remember_link = lru_cache(maxsize=1024, typed=True)


@_remember_link
def link_term(name: str, words: str = "") -> Markup:
    """Return a link to a word's entry, with its meaning as the title; raise `KeyError` for an unknown word."""
    found, mark = terms()[anchor(name)], anchor(name)
    return _ANCHOR.format(TERMS_PLACE, mark, plain_text(found.meaning), words or name)


def note_term(name: str, words: str = "") -> Markup:
    """Return the words with their meaning as the title, for a document that has no pages beside it."""
    found = terms()[anchor(name)]
    return Markup('<abbr title="{}">{}</abbr>').format(plain_text(found.meaning), words or name)


@_remember_link
def link_code(code: str, words: str = "") -> Markup:
    """Return a link to an error code's entry; without a link if it is unknown, as of a later version."""
    shown = escape(words) if words else Markup("<code>{}</code>").format(code)
    if code not in codes():
        return shown
    return _ANCHOR.format(CODES_PLACE, code, plain_text(codes()[code][0].cause), shown)


def note_code(code: str, words: str = "") -> Markup:
    """Return the code, or the words for it, for a document that has no pages beside it."""
    return escape(words) if words else Markup("<code>{}</code>").format(code)


def term_names(*names: str, **words: str) -> dict[str, str]:
    """Return what a text may say for each term, for `link_first`: the term itself, or the words that are given for it.

    A keyword has underscores for what the name of its term has between words.
    """
    return {name: name for name in names} | {said: name.replace("_", " ") for name, said in words.items()}


@cache
def _mention_pattern(words: frozenset[str]) -> re.Pattern[str]:
    """Return the pattern of code in backticks and of these words; templates name few sets of words, each many times."""
    shape = "|".join(re.escape(each) for each in sorted(words, key=len, reverse=True)) or r"(?!)"
    return re.compile(rf"`(?P<code>[^`\n]+)`|\b(?P<words>{shape})(?P<plural>s?)\b", re.IGNORECASE)


def link_first(text: str, names: Mapping[str, str], link: Linked) -> Markup:
    """Escape a text and link where it first says each of the words, alone or in the plural; backticks become code.

    names  words as the text may have them -> the term that explains them
    """
    left = {words.lower(): name for words, name in names.items()}
    pattern = _mention_pattern(frozenset(left))

    def pieces() -> Iterator[str]:
        end = 0
        for found in pattern.finditer(text):
            yield str(escape(text[end : found.start()]))
            end = found.end()
            if found["code"]:
                shown, name = Markup("<code>{}</code>").format(found["code"]), left.pop(found["code"].lower(), None)
                yield str(link(name, shown) if name else shown)
            elif name := left.pop(found["words"].lower(), None):
                yield str(link(name, found[0]))
            else:
                yield str(escape(found[0]))
        yield str(escape(text[end:]))

    return Markup("".join(pieces()))  # noqa: S704 - each piece is escaped
