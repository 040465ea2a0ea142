"""American spelling in code, comments, docstrings and messages, as docs/glossary.md asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "worker", "spard", "examples", "tools", "benchmarks", "tests/app", "tests/worker", "tests/spard")

# Words as data: prompts and canaries, whose change would change verdicts, a key that readers of the output know, and a
# name that a library calls.
KEPT: Mapping[str, set[str]] = {
    "app/settings.py": {"customise"},
    "spard/commands/verify.py": {"defence"},
    "spard/evaluation/judges/wrappers.py": {"favour"},
    "spard/evaluation/judges/classifier.py": {"behaviour"},
    "spard/evaluation/judges/llm.py": {"fulfil", "fulfils"},
    "spard/evaluation/judges/refusal.py": {"apologise"},
}

OUR = "arm|behavi|col|demean|endeav|fav|flav|harb|hon|hum|lab|neighb|od|parl|rig|rum|sav|splend|tum|vap|vig"
ISE = (
    "anonym|apolog|author|canonical|capital|categor|central|character|civil|commercial|container|critic|custom|digit"
    "|emphas|equal|external|factor|final|formal|general|global|harmon|ideal|initial|internal|item|legal|linear|local"
    "|magnet|material|maxim|mechan|memor|minim|mobil|modern|monet|moral|neutral|normal|optim|organ|parallel|parametr"
    "|patron|penal|polar|popular|prior|privat|quant|random|rational|real|recogn|regular|sanit|scrutin|serial|special"
    "|stabil|standard|subsid|summar|symbol|sympath|synchron|synthes|token|util|vandal|vector|victim|virtual|visual"
    "|weapon"
)
DOUBLED = (
    "channel|counsel|dial|equal|fuel|initial|jewel|label|level|marvel|model|pencil|quarrel|signal|total|travel|tunnel"
)
BRITISH = re.compile(
    rf"(?:mis|un|re|dis|de)?(?:{OUR})our\w*"
    rf"|(?:un|re|de|dis)?(?:{ISE})is(?:e[drs]?|ers|ing|ations?|ational|able)"
    rf"|(?:un|re)?(?:{DOUBLED})l(?:ed|ing|ers?)"
    r"|(?:anal|catal|paral)ys(?:e[dr]?|ing)"
    r"|(?:def|off|lic|pret)ences?|practis(?:e[ds]?|ing)"
    r"|cent(?:re[ds]?|ring)|(?:cali|fi|sa|som|spec|thea)[bt]re|(?:kilo|milli|centi)?(?:lit|met)res?"
    r"|(?:burn|drea?m|lean|leap|(?:un|re)?learn|smel|spel|spoil)t"
    r"|grey\w*|artefacts?|catalogues?d?|programmes?|cheques?|sceptic\w*|mould\w*|plough\w*|tyres?|ageing|storeys?"
    r"|(?:acknowled|jud)gements?|enrol|fulfils?|fulfilment|instalments?|skilful\w*|wilful\w*"
    r"|whilst|amongst|(?:after|to)wards"
)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of prose and of names in any case


def british(text: str) -> set[str]:
    """Return the words of a text, parts of names among them, that are spelled as in Britain."""
    return {word for each in WORD.findall(text) if BRITISH.fullmatch(word := each.lower())}


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_are_spelled_as_in_america(folder: str) -> None:
    files = {path: path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*.py"))}
    assert files
    found = {name: british(path.read_text(encoding="utf-8")) - KEPT.get(name, set()) for path, name in files.items()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_there(name: str) -> None:
    assert KEPT[name] <= british((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "labelled_states",
        "COLOURS",
        "NeighbourOrder",
        "_tokenise(",
        "unnormalised",
        "Organisation",
        "re-centred",
        "GREY",
    ],
)
def test_british_words_are_found_in_names_and_prose(text: str) -> None:
    assert british(text)


@pytest.mark.parametrize(
    "text",
    ["four hours of our source", "raise ValueError", "otherwise precise", "a license, called and filled", "analyses"],
)
def test_american_words_are_not(text: str) -> None:
    assert british(text) == set()
