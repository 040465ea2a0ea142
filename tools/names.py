"""`python -m tools.names`: lists names that do not say what they name, and docstrings that only repeat a name.

A function's name must be a verb (`broadcast_object`) or a noun of the field (`prompt_tokens`). Reported are:

participle   one word that is a past participle (`said`, `_held`), or participles with adverbs alone (`asked_again`);
             of classes of the product also one in -ing (`Wrapping`), but not of exceptions: they say what happened
preposition  a function's name that ends in one (`key_of`, `wait_for`), except phrasal verbs that are words of the field
word         a name that is private to its author (`own`, `taker`)
glossary     a module, class or function of the product whose name has a word of the column "not" of docs/glossary.md
docstring    one that has no word beside those of the name

Dunder methods and the tests themselves (`test_...`) are left out: Python or a sentence decides their names.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
PRODUCT = ("app", "worker", "spard", "lab/spard_lab", "tools", "benchmarks")
FOLDERS = (*PRODUCT, "lab", "tests", "examples")

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
ALLOWED_CLASSES = {  # participles and words in -ing, with the reason for each
    "Asking": "class of a recipe's table, in the stable names of `spard.config`",
    "Bound": "noun: a limit of an interval",
    "Drawing": "noun: a figure",
    "Ending": "noun, and a term of the glossary",
    "Filing": "noun: a job of another account with what became of it here",
    "Finding": "noun: the result of a check",
    "Opening": "noun: the beginning of a reply",
    "Pretraining": "noun: the first training of a model",
    "Rendering": "noun: a text made with a chat template",
    "Sampling": "noun: OpenAI's parameters for drawing tokens",
    "Supervised": "OpenAI's name of a method",
    "Timing": "noun: measured times",
    "Training": "noun",
}
ORDINARY = {  # words of the glossary's column "not" that names need in another sense, with that sense
    "agent": "the auditing agent",
    "client": "a program that sends requests; it is refused for the person only",
    "comparison": "of two models; it is refused for preference pairs only",
    "config": "`spard.config` is a stable module, and `..._config` is the word of transformers and torchrun",
    "correction": "the variants of SPAG's step; and the statistical correction of a rate for a judge's errors",
    "delta": "OpenAI's word for a piece of a stream",
    "epoch": "of a training; it is refused for fencing tokens only",
    "limit": "of a rate, a size or a time; it is refused for quotas and policies only",
    "lock": "of a file, a row or a thread; it is refused for leases only",
    "log": "the audit log and Python's logging",
    "move": "verb: put elsewhere; and moving in",
    "override": "Python's and FastAPI's word; it is refused for waivers only",
    "penalty": "the term added to a loss, which the glossary calls the anchor; it is refused for constraints only",
    "server": "a process that answers requests, such as vLLM's; it is refused for the embedded engine only",
    "similarity": "of two texts; it is refused for a safe example's relevance only",
    "state": "of an optimizer, a model or the schema, and the hidden states; it is refused for a job's status only",
    "step": "of an optimizer; it is refused for stages only",
    "task": "what the customer's rows teach (task check, task replies); it is refused for jobs only",
    "test": "of a program or a promptfoo file",
    "token": "of a tokenizer, and the fencing token; it is refused for keys only",
    "verification": "of hashes and certificates; it is refused for proofs only",
}
ALLOWED_WORDS = {  # single names with a word of that column, with the reason for each
    "benchmarks": "the folder of measurements of this service's own speed",
    "classifier": "module of the judge of that kind, which its setting calls `classifier`",
    "ClassifierJudge": "the judge of that kind",
    "open_classifier": "opens the judge of that kind",
    "filters": "module of the filters of system calls",
    "_filters": "of a list's query, as OpenAI calls them",
    "name_host": "the kernel's word: sethostname",
    "_look_up_host": "a host name, in DNS",
    "Sampling": "of tokens: OpenAI's parameters",
    "UserError": "base of the errors of `spard`, which customers' programs catch",
    "enter_user_namespace": "the kernel's word",
    "retry_after_s": "HTTP's header",
    "parse_retry_header": "HTTP's header",
    "_role_texts": "a message's role, in the chat format",
    "_metadata": "a field of CycloneDX",
    "Trainer": "trains, as the classes of that name in transformers and TRL do",
}
WORDS = {"own", "_own", "first_s", "wish", "_wish", "taker", "comparer", "works", "leave_word", "lend", "wear", "desk"}


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
_FILLERS = _words("a an and are by for from give in is it of on return s that the this to which with yield")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ROW = re.compile(r"^\|([^|]+)\|[^|]*\|([^|]*)\|$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A definition whose name or docstring breaks a rule."""

    path: Path
    line: int
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.why}"


@cache
def refused_words(glossary: Path = GLOSSARY) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of the glossary's column "not" that names must not have, and the glossary's terms.

    A word that is a term of another row is not refused: only a reader sees which of the two a name means.
    """
    rows = [row for row in _ROW.findall(glossary.read_text()) if row[0].strip() not in ("word", "---")]
    plain = [re.sub(r"\(.*?\)", "", term) for term, _ in rows]
    terms = frozenset(" ".join(split_name(each)) for cell in plain for each in cell.split(","))
    words = {" ".join(split_name(each)) for _, cell in rows for each in cell.split(",")}
    return frozenset(words - terms - ORDINARY.keys() - {""}), terms


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


def class_fault(name: str) -> str | None:
    """Return what is wrong with a class's name, or None."""
    words = split_name(name)
    if name.strip("_") in ALLOWED_CLASSES or not words:
        return None
    if "_".join(words) in WORDS:
        return "a word that only its author knows"
    is_bare = all(_is_participle(word) or word.endswith("ing") or word in _ADVERBS for word in words)
    return "a bare participle" if is_bare and words[0] not in _ADVERBS else None


def word_fault(name: str, glossary: Path = GLOSSARY) -> str | None:
    """Return the fault of a name that has a word of the glossary's column "not", or None."""
    refused, terms = refused_words(glossary)
    text = f" {' '.join(split_name(name))} "
    for term in terms:  # a term may contain a refused word, as "fine-tuned model" does
        text = text.replace(f" {term} ", " | ") if " " in term else text
    found = sorted(word for word in refused if f" {word} " in text or f" {word}s " in text)
    return f'"{found[0]}" is in the column "not" of the glossary' if found and name not in ALLOWED_WORDS else None


def docstring_fault(name: str, docstring: str | None) -> str | None:
    """Return the fault of a docstring that says no more than the name, or None."""
    said, named = _content(docstring or ""), _content(name)
    return "the docstring only repeats the name" if said and said <= named else None


def split_name(name: str) -> list[str]:
    """Return the parts of a name in snake case or in capitals, in lower case."""
    return [part.lower() for part in _PARTS.findall(name)]


def find_faults(root: Path = ROOT) -> Iterator[Finding]:
    """Yield the bad names and docstrings in a repository, in order."""
    paths = sorted({path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py")})
    trees = {path: ast.parse((root / path).read_bytes()) for path in paths}
    exceptions = _exceptions(trees.values())
    for path, tree in trees.items():
        is_product = path.as_posix().startswith(tuple(f"{folder}/" for folder in PRODUCT))
        module = path.parent.name if path.name == "__init__.py" else path.stem
        if is_product and (why := word_fault(module)):
            yield Finding(path, 1, module, why)
        for node in ast.walk(tree):
            if isinstance(node, _DEFINITIONS):
                for why in _faults(node, exceptions, is_product=is_product):
                    yield Finding(path, node.lineno, node.name, why)


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = list(find_faults())
    for each in found:
        print(each)
    if found:
        print(f"{len(found)} names or docstrings do not say what is done, returned or held; see tools/names.py.")
    return int(bool(found))


def _faults(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, exceptions: frozenset[str], *, is_product: bool
) -> Iterator[str]:
    found = [docstring_fault(node.name, ast.get_docstring(node))]
    if not isinstance(node, ast.ClassDef):
        found.append(fault(node.name))
    elif is_product and node.name not in exceptions:
        found.append(class_fault(node.name))
    if is_product:
        found.append(word_fault(node.name))
    return (each for each in found if each)


def _exceptions(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Return the names of the classes that derive from an exception, directly or through each other."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = [(node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}) for node in classes]
    found, before = {"BaseException", "Exception"}, 0
    while len(found) > before:
        before = len(found)
        found |= {name for name, of in bases if of & found or any(each.endswith("Error") for each in of)}
    return frozenset(found)


def _content(text: str) -> set[str]:
    """Return a text's words without fillers and the s of plurals and verbs."""
    words = {re.sub(r"(?<=[^s])s$", "", word) if len(word) > 3 else word for word in split_name(text)}
    return words - _FILLERS


def _is_participle(word: str) -> bool:
    return word in _IRREGULAR or (len(word) > 3 and word.endswith("ed") and word not in _NO_PARTICIPLES)


if __name__ == "__main__":
    sys.exit(main())
