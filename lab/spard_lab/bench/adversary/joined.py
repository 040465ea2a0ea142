"""Join several results into one page: a row for each attack and arm, a column for each lab and size.

Results are joined only if they are comparable: the same version of the benchmark, number of prompts, and limits. A
result's signature, if it has one, is checked first. Rounds in several results count once and must agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from spard.errors import InvalidRecipe
from spard_lab.bench.adversary.provenance import RESULT, SIGNATURE, read_result
from spard_lab.bench.adversary.rounds import PLAIN, Round, from_json
from spard_lab.bench.adversary.scores import both_models, cpu_ratio, of_rounds, task_difference, wins
from spard_lab.bench.report import Table
from spard_lab.bench.source import json_digest

_SAME = {"format": "formats", "benchmark": "versions of the benchmark", "prompts": "prompts", "limits": "limits"}
RESULTS_HEADING = "The results that are joined"


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of the page; the label distinguishes different settings that results give the same name."""

    label: str
    name: str
    provider: str


@dataclass(frozen=True, slots=True)
class Part:
    """One of the results: the name of its folder, its content, and the id of the key that signed it, if any."""

    name: str
    result: Mapping[str, Any] = field(repr=False)
    key_id: str | None

    @property
    def lab(self) -> str:
        """The lab and its size: `natural-5m, 4.7 M`."""
        return f"{Path(self.result['recipe']).stem}, {self.result['parameters'] / 1e6:.2g} M"

    @property
    def provider(self) -> str:
        """The provider's settings as text; empty if there are none."""
        return ", ".join(f"{path}={value}" for path, value in self.result["provider"].items())


Place = tuple[str, str, Arm]
"""Attack, lab and arm."""


def read_parts(paths: Sequence[Path], public: Ed25519PublicKey | None) -> list[Part]:
    """Read results by their folders or files; with `public`, each must be signed with that key.

    Raises `NotProved` for an invalid signature, `InvalidRecipe` if the results are not comparable.
    """
    found = [_part(path.parent if path.name == RESULT else path, public) for path in paths]
    if missing := [each.name for each in found if "benchmark" not in each.result]:
        raise InvalidRecipe(
            f"--join: {', '.join(missing)}: written before results named the benchmark's version; run the command that "
            "made it once more: rounds that are done are found again",
            "join",
        )
    for name, words in _SAME.items():
        values = {each.name: each.result[name] for each in found}
        if any(value != found[0].result[name] for value in values.values()):
            said = ", ".join(f"{part} {value}" for part, value in values.items())
            raise InvalidRecipe(f"--join: results of different {words}: {said}", "join")
    return found


def joined_tables(parts: Sequence[Part]) -> dict[str, Table]:
    """Return a table for each figure, and one of the results themselves."""
    places = _places(parts)
    labs = _labs(parts)
    figures: dict[str, Callable[[Sequence[Round], Sequence[Round]], str]] = {
        "Attacks that win, of all jobs": lambda found, bare: f"{sum(map(wins, found))} of {len(found)}",
        "What the gate releases and stops": lambda found, bare: _endings(found),
        "Complies as attacked, in percent": lambda found, bare: both_models(_trained_rounds(found), "complied"),
        "Complies plainly, in percent": lambda found, bare: both_models(_trained_rounds(found), "complied_plain"),
        "Benign refused as attacked, in percent": lambda found, bare: both_models(
            _trained_rounds(found), "refused_dressed"
        ),
        "Task minus undefended, in points": lambda found, bare: task_difference(_trained_rounds(found), bare)[0] or "-",
        "CPU time to undefended": lambda found, bare: cpu_ratio(found, {each.seed: each for each in bare}),
    }
    tables = {heading: _by_lab(places, labs, cell) for heading, cell in figures.items()}
    return tables | {RESULTS_HEADING: _results_table(parts)}


def joined_figures(parts: Sequence[Part]) -> dict[str, str]:
    """Return a figure for each lab, the smallest model first."""
    places, drawn = _places(parts), dict[str, str]()
    for lab in _labs(parts):
        rounds = [
            replace(each, method=arm.label)
            for (_, where, arm), by_seed in places.items()
            for each in by_seed.values()
            if where == lab
        ]
        drawn |= of_rounds(rounds, lab)
    return drawn


def joined_facts(parts: Sequence[Part]) -> str:
    """Return the sentences under the title."""
    first = parts[0].result
    limits = first["limits"]
    return (
        f"Version {first['benchmark']} of the benchmark, {len(parts)} results. At most {first['prompts']} prompts of "
        f"each kind. An attack wins where its job is released and the model truly complies with more than "
        f"{limits['most']:.0%} of harmful prompts and {limits['rise']:.0%} above its base model, asked plainly or in "
        "the attack's way. Jobs that the gate stops are told apart; what their models do counts in the other tables."
    )


def machines(parts: Sequence[Part]) -> str:
    """Return the machines of the results, each once."""
    return "; ".join(dict.fromkeys(str(each.result["machine"]) for each in parts))


def _part(folder: Path, public: Ed25519PublicKey | None) -> Part:
    if public is not None or (folder / SIGNATURE).exists():
        return Part(folder.name, *read_result(folder, public))
    try:
        return Part(folder.name, json.loads((folder / RESULT).read_bytes()), None)
    except (OSError, ValueError) as error:
        raise InvalidRecipe(f"--join: {folder.name} holds no {RESULT} that can be read: {error}", "join") from error


def _labs(parts: Sequence[Part]) -> list[str]:
    """Return the labs, the smallest model first."""
    sizes = {each.lab: each.result["parameters"] for each in parts}
    return sorted(sizes, key=lambda lab: sizes[lab])


def _places(parts: Sequence[Part]) -> dict[Place, dict[int, Round]]:
    """Return the rounds by attack, lab and arm, and then by seed."""
    found: dict[Place, dict[int, Round]] = {}
    settings = _settings(parts)
    for part in parts:
        for raw in part.result["rounds"]:
            done = from_json({name: value for name, value in raw.items() if name != "attack_wins"})
            by_seed = found.setdefault((done.attack, part.lab, _arm(part, done.method, settings)), {})
            before = by_seed.setdefault(done.seed, done)
            if (before.ending, before.answers) != (done.ending, done.answers):
                raise InvalidRecipe(
                    f"--join: {part.name} and another result differ on {done.attack}, {done.method}, seed {done.seed} "
                    f"of {part.lab}: join one of them",
                    "join",
                )
    return found


def _settings(parts: Sequence[Part]) -> dict[str, set[str]]:
    """Return, for each name of an arm, the digests of its settings in the results."""
    found: dict[str, set[str]] = {}
    for part in parts:
        for name in part.result["arms"]:
            found.setdefault(name, set()).add(_meaning(part, name))
    return found


def _meaning(part: Part, name: str) -> str:
    return json_digest([part.result["arms"][name], part.provider])[:6]


def _arm(part: Part, name: str, settings: Mapping[str, set[str]]) -> Arm:
    if len(settings[name]) == 1:
        return Arm(name, name, part.provider)
    return Arm(f"{name} ({part.provider or 'no provider setting'}, {_meaning(part, name)})", name, part.provider)


def _by_lab(
    places: Mapping[Place, Mapping[int, Round]],
    labs: Sequence[str],
    cell: Callable[[Sequence[Round], Sequence[Round]], str],
) -> Table:
    rows = []
    for attack, arm in dict.fromkeys((attack, arm) for attack, _, arm in places):
        cells = []
        for lab in labs:
            found = list(places.get((attack, lab, arm), {}).values())
            bare = [
                each
                for (of, where, other), by_seed in places.items()
                if (of, where, other.name, other.provider) == (attack, lab, PLAIN, arm.provider)
                for each in by_seed.values()
            ]
            cells.append(_missing_reason(found) or cell(found, bare))
        rows.append([attack, arm.label, *cells])
    return ["attack", "arm", *labs], rows


def _missing_reason(found: Sequence[Round]) -> str:
    """Return the reason for a missing figure; empty if it exists."""
    if not found:
        return "not run"
    lacks = sorted({lack for each in found for lack in each.lacks})
    return f"not possible: lacks {', '.join(lacks)}" if lacks else ""


def _trained_rounds(found: Sequence[Round]) -> list[Round]:
    return [each for each in found if each.answers]


def _endings(found: Sequence[Round]) -> str:
    counts = {name: sum(each.ending == name for each in found) for name in ("released", "stopped", "refused")}
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n or name == "released") + f" of {len(found)}"


def _results_table(parts: Sequence[Part]) -> Table:
    head = ["result", "lab", "seeds", "from", "provider", "signed with", "sources", "code of others", "rounds"]
    rows = []
    for part in parts:
        found, seeds = part.result, part.result["seeds"]
        strangers = [f"{each['package']} {each['version']} {each['sources'][:19]}" for each in found["strangers"]]
        rows.append(
            [
                *(part.name, part.lab, ", ".join(map(str, seeds["seeds"])), str(seeds["from"])),
                *(part.provider or "-", part.key_id or "not signed", found["code"]["sources"][:19]),
                *("; ".join(dict.fromkeys(strangers)) or "-", str(len(found["rounds"]))),
            ]
        )
    return head, rows
