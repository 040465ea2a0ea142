"""`python -m tools.names`: lists functions and methods whose names do not say what they do.

A name must be a verb (`broadcast_object`) or a noun of the field (`prompt_tokens`). Reported are:

participle   one word that is a past participle (`said`, `_held`), or participles with adverbs alone (`asked_again`)
preposition  a name that ends in one (`key_of`, `wait_for`), except phrasal verbs that are words of the field
word         a name that is private to its author (`own`, `taker`)

Dunder methods and the tests themselves (`test_...`) are left out: Python or a sentence decides their names.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "worker", "spard", "lab", "tests", "tools", "benchmarks", "examples")

ALLOWED = {  # with the reason for each
    "back_up": "verb: make a backup",
    "fail_over": "verb: switch to the other server",
    "look_up": "verb: resolve a name",
    "set_up": "verb: prepare, as in unittest",
    "sign_in": "verb, and the name of its route",
    "sign_out": "verb, and the name of its route",
    "wait_until": "verb, as in Playwright",
    "write_until": "field of a dataclass: a writer that stops where a check holds",
    "down": "the command `spard down`",
    "up": "the command `spard up`",
}
WORDS = {"own", "_own", "first_s", "wish", "_wish", "taker", "comparer", "works", "leave_word", "lend", "wear"}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PREPOSITIONS = _words("""
    about above across after against along among around as at before behind below beneath beside besides between by
    down during for from in into near of off on onto out over per since than through to toward under until up upon
    via with within without
""")
_ADVERBS = _words("""
    again already alone anew apart aside away back elsewhere first here last not once so then too twice
""")
_IRREGULAR = _words("""
    awoken beaten become been begun bent bitten bled blown born borne bought bound bred broken brought built
    caught chosen clung dealt done drawn driven drunk dug eaten fallen fed felt fled flown forgotten found fought
    frozen given gone gotten grown heard held hidden hung kept known laid lain led left lent lit lost made
    meant met mistaken overridden overwritten paid proven redone rewritten ridden rung risen said seen sent sewn
    shaken shot shown shrunk slept slid sold sought spent spoken sprung spun stolen stood struck stuck strung
    sung sunk swept sworn swum swung taken taught thought thrown told torn undone understood upheld withdrawn
    withheld woken won worn wound woven written
""")
_NO_PARTICIPLES = _words("""
    bed bleed breed deed embed exceed feed greed heed indeed need proceed red reed seed shed speed weed wed
""")


@dataclass(frozen=True)
class Finding:
    """A function whose name breaks a rule."""

    path: Path
    line: int
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.why}"


def fault(name: str) -> str | None:
    """Return what is wrong with a function's name, or None."""
    bare = name.strip("_").lower()
    words = [word for word in bare.split("_") if word]
    if not words or bare in ALLOWED or name.startswith(("__", "test_")):
        return None
    if name in WORDS:
        return "a word that only its author knows"
    if all(_is_participle(word) or word in _ADVERBS for word in words) and _is_participle(words[0]):
        return "a bare participle"
    return "ends in a preposition" if words[-1] in _PREPOSITIONS else None


def find_faults(root: Path = ROOT) -> Iterator[Finding]:
    """Yield the bad names in a repository, in order."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (why := fault(node.name)):
                    yield Finding(path.relative_to(root), node.lineno, node.name, why)


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = list(find_faults())
    for each in found:
        print(each)
    if found:
        print(f"{len(found)} names say neither what is done nor what is returned; see tools/names.py.")
    return int(bool(found))


def _is_participle(word: str) -> bool:
    return word in _IRREGULAR or (len(word) > 3 and word.endswith("ed") and word not in _NO_PARTICIPLES)


if __name__ == "__main__":
    sys.exit(main())
