"""What a result of the adversary's bench rests on: hidden seeds, the code of other packages, and a signature.

Seeds are derived from a text that did not exist, or was not known, when settings were chosen: the hash of the commit
with the final defense, or a secret that is given when the bench runs. Seed i is the first 31 bits of SHA-256 of "spard
adversary", the text and i; seeds below `FIRST` are for development and skipped. A result has the digest of the text, so
that a secret can be checked once it is published.

Defenses, attacks, judges and selections of other packages are recorded by digests of their code: the Python files (and
compiled modules) of the top-level modules of a package's entry point and method, and of its distribution's file list.
Packages that it imports, and files of other kinds, are not covered.

A result is `result.json`, and beside it an Ed25519 signature of its bytes. The keys are those that sign adapters
(`spard.release.keys`). A signature proves the signer and that nothing changed since; only running the command again
proves that the figures were measured as stated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spard.config import Defense, JudgeSpec, Recipe, defenses
from spard.config.extensions import JUDGES, SELECTIONS
from spard.errors import InvalidRecipe, NotProved
from spard.release.manifest import check, sign_bytes
from spard.release.version import code_version
from spard.replacement import write_atomically
from spard_lab.adversary.base import ATTACKS_GROUP, Attack

FIRST = 100_000
LEAST = 8  # characters of the text; a shorter one could be guessed


def hidden_seeds(text: str, n: int) -> tuple[int, ...]:
    """Return n different seeds of a text; raise `InvalidRecipe` if it is too short to be secret."""
    if len(text.strip()) < LEAST:
        raise InvalidRecipe(
            f"hidden seeds come from a commit hash or a secret of at least {LEAST} characters", "hidden"
        )
    found: dict[int, None] = {}
    for i in count():
        digest = hashlib.sha256(f"spard adversary\n{text.strip()}\n{i}".encode()).digest()
        seed = int.from_bytes(digest[:4]) >> 1
        if seed >= FIRST:
            found[seed] = None
        if len(found) == n:
            return tuple(found)
    raise AssertionError("count() does not end")


def commitment(text: str) -> str:
    """Return the digest of a text, for checking it later."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


Kind = Literal["defense", "attack", "judge", "selection"]
GROUPS: dict[Kind, str] = {
    "defense": "spard.defenses",
    "attack": ATTACKS_GROUP,
    "judge": JUDGES.group,
    "selection": SELECTIONS.group,
}
_CODE = (".py", ".so", ".pyd")


@dataclass(frozen=True, slots=True)
class Stranger:
    """An entry point of another package: its distribution's name and version, and the digest of its code files."""

    kind: Kind
    name: str
    package: str
    version: str
    sources: str
    files: int


def find_strangers(recipes: Iterable[Recipe], attacks: Sequence[Attack], judge: JudgeSpec) -> list[Stranger]:
    """Return the entries of other packages among arms, attacks and judge, each once."""
    used: dict[tuple[Kind, str], None] = {}
    for recipe in recipes:
        used.setdefault(("defense", recipe.defense.type))
        if recipe.uses_pool:
            used.setdefault(("selection", recipe.selection.method))
    used.update({("attack", each.name): None for each in attacks})
    used.update({("judge", each.name): None for each in judge.with_members()})
    return [found for kind, name in used if (found := stranger(kind, name))]


@cache
def stranger(kind: Kind, name: str) -> Stranger | None:
    """Return the other package's entry of a name; None if the name is ours or not installed."""
    entry = next(iter(entry_points(group=GROUPS[kind], name=name)), None)
    if entry is None:
        return None
    modules = [entry.module]
    if kind == "defense" and (settings := defenses().get(name)):
        modules.append(_method_module(settings))
    files = _files(modules, entry)
    dist = entry.dist
    found = (dist.name, dist.version) if dist else ("unknown", "unknown")
    return Stranger(kind, name, *found, _digest(files), len(files))


def code_told(result: Mapping[str, Any]) -> list[str]:
    """Return lines that compare the code of a result with the code installed here."""
    here, code = code_version(), result["code"]
    lines = [f"spard {code['spard']}, sources {code['sources']}: {_compare_digest(code['sources'], here['sources'])}"]
    for each in result.get("strangers", ()):
        own = stranger(each["kind"], each["name"])
        said = _compare_digest(each["sources"], own.sources if own else None)
        lines.append(
            f"{each['kind']} {each['name']} of {each['package']} {each['version']}, sources {each['sources']}: {said}"
        )
    others = [each["code"] for each in result["rounds"] if each.get("code") not in (None, "", code["sources"])]
    unknown = sum(not each.get("code") for each in result["rounds"] if each["ending"] != "not possible")
    lines += [f"{others.count(each)} rounds were played by other sources, {each}" for each in dict.fromkeys(others)]
    return [*lines, f"{unknown} rounds were played by sources that they do not name"] if unknown else lines


def to_json(found: Iterable[Stranger]) -> list[dict[str, Any]]:
    """Return the entries as JSON, for a result."""
    return [asdict(each) for each in found]


def _compare_digest(said: str, here: str | None) -> str:
    if here is None:
        return "not installed here"
    return "the same as here" if said == here else "other code than here"


def _method_module(settings: type[Defense]) -> str:
    return settings.method.partition(":")[0]


def _files(modules: Sequence[str], entry: EntryPoint) -> dict[str, Path]:
    """Return the code files by their import names."""
    found = {name: path for module in modules for name, path in _package_files(module)}
    return found | dict(_distribution_files(entry.dist)) if entry.dist else found


def _package_files(module: str) -> Iterable[tuple[str, Path]]:
    """Yield the files of the topmost package of a module that is no namespace, or the module's own file."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:i]))
        if spec is None or not spec.has_location or spec.origin is None:
            continue  # a namespace package, which several distributions may share
        path = Path(spec.origin)
        if not spec.submodule_search_locations:
            yield "/".join([*parts[: i - 1], path.name]), path
            return
        for each in sorted(path.parent.rglob("*")):
            if each.suffix in _CODE and each.is_file():
                yield "/".join([*parts[:i], *each.relative_to(path.parent).parts]), each
        return


def _distribution_files(dist: Distribution) -> Iterable[tuple[str, Path]]:
    """Yield the code files of a distribution's list; an editable installation lists almost none."""
    for each in dist.files or ():
        path = Path(str(each.locate()))
        if each.suffix in _CODE and ".." not in each.parts and path.is_file():
            yield each.as_posix(), path


def _digest(files: Mapping[str, Path]) -> str:
    whole = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return f"sha256:{whole.hexdigest()}"


RESULT, SIGNATURE = "result.json", "result.sig"


def write_result(folder: Path, result: Mapping[str, Any], key: Ed25519PrivateKey | None) -> None:
    """Write the result, signed if there is a key; the signature of an earlier result is removed."""
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(folder / RESULT, text)
    (folder / SIGNATURE).unlink(missing_ok=True)
    if key is not None:
        write_atomically(folder / SIGNATURE, json.dumps(sign_bytes(text.encode(), key), indent=2) + "\n")


def read_result(folder: Path, public: Ed25519PublicKey | None) -> tuple[dict[str, Any], str]:
    """Return a result and the id of the key that signed it.

    Raises `NotProved` unless there is a valid signature of these bytes, by `public` if it is given.
    """
    try:
        content, signature = (folder / RESULT).read_bytes(), (folder / SIGNATURE).read_bytes()
    except OSError as error:
        raise NotProved(f"{error.filename} cannot be read: {error.strerror}.") from error
    key_id = check(content, signature, public, RESULT)
    found: dict[str, Any] = json.loads(content)
    return found, key_id
