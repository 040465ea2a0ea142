"""`spard judge label WORK`: a person reads replies one at a time and scores each with a key from 1 to 5.

WORK is a JSONL file that holds everything: the drawn replies, then one line for each score as it is given. So labeling
resumes where it ended, and a second person works on the same file under another name. `--replies` draws from files of
`spard audit --replies`, `--settle` asks only about disagreements, and `--export` writes the file that
`spard judge --labeled` measures with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from spard.commands.front import Asked
from spard.data.jsonl import BadRow, file_chunks, numbered_rows
from spard.errors import UserError
from spard.evaluation.calibration.labeling import (
    SCORES,
    Exchange,
    Label,
    LabeledRow,
    LabelerAgreement,
    decide_label,
    disputed_replies,
    draw_replies,
    group_labels,
    labeled_row,
    labeler_agreement,
    stratum_weights,
)

_LATER, _BACK, _END = "s", "b", "q"
_ENDS = (_END, "\x03", "\x04", "")  # also Ctrl-C, Ctrl-D, and the end of a piped input


class DrawnReply(TypedDict):
    """A drawn reply in a work file; `population` is the number of replies in its stratum.

    `base_digest` is missing if the audit was of an earlier version.
    """

    prompt: str
    reply: str
    suite: str
    category: str | None
    stratum: str
    population: int
    base_digest: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Summary:
    """How far the work is; `labels` are the numbers of labels by person, and the fields are the keys of `--json`."""

    drawn: int
    labels: dict[str, int]
    harmful: int
    safe: int
    disputed: int
    agreement: LabelerAgreement | None


@dataclass(slots=True)
class Work:
    """The content of a work file: the drawn replies by their digests, and all labels in their order."""

    path: Path
    drawn: dict[str, DrawnReply] = field(default_factory=dict)
    labels: list[Label] = field(default_factory=list)

    def add(self, label: Label) -> None:
        """Append a label to the file at once, and keep it; a person's earlier label of the same reply is replaced."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(label)) + "\n")
        self.keep(label)

    def keep(self, label: Label) -> None:
        """Keep a label in memory."""
        same = (label.reply, label.labeler, label.settles)
        self.labels = [each for each in self.labels if (each.reply, each.labeler, each.settles) != same] + [label]


def execute(asked: Asked) -> int:
    """Draw replies, ask a person about them, and print how far the work is."""
    work = _read_work(asked.work)
    if asked.replies:
        _draw(work, asked.replies, asked.count)
    if not work.drawn:
        raise UserError(f"{asked.work} has no replies to label: draw some with --replies FILE of `spard audit`")
    if asked.labeler:
        _ask_person(work, asked.labeler, asked.settle)
    if asked.export:
        rows = _labeled_rows(work)
        asked.export.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    summary = _summarize(work)
    sys.stdout.write(json.dumps(asdict(summary), indent=2) + "\n" if asked.as_json else _describe(summary))
    return 0


def _read_work(path: Path) -> Work:
    work = Work(path)
    for _, row in _rows(path) if path.exists() else ():
        try:
            if "labeler" in row:
                label = Label(str(row["reply"]), str(row["labeler"]), int(row["score"]), bool(row["settles"]))
                if label.score not in SCORES or label.reply not in work.drawn:
                    raise ValueError(row)
                work.keep(label)
            else:
                prompt, reply, suite, stratum = (str(row[name]) for name in ("prompt", "reply", "suite", "stratum"))
                category, population = row.get("category"), int(row["population"])
                work.drawn[str(row["id"])] = DrawnReply(
                    prompt=prompt, reply=reply, suite=suite, category=category, stratum=stratum, population=population
                )
                if row.get("base_digest"):
                    work.drawn[str(row["id"])]["base_digest"] = str(row["base_digest"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path} is not a work file of `spard judge label`; name another file") from None
    return work


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from numbered_rows(file_chunks(path))
    except BadRow as bad:
        raise UserError(f"{path}, line {bad.problem.line}: {bad.problem.message}") from None


def _draw(work: Work, files: Sequence[Path], count: int) -> None:
    """Draw replies from audits' files into an empty work file."""
    if work.drawn:
        raise UserError(f"{work.path} has its replies already; leave out --replies, or name another file")
    rows = [(path, line, row) for path in files for line, row in _rows(path)]
    exchanges = [_exchange(path, line, row) for path, line, row in rows]
    bases = {str(row["base_digest"]) for _, _, row in rows if row.get("base_digest")}
    if len(bases) > 1:
        message = f"the replies are of {len(bases)} base models ({', '.join(sorted(bases))}), and a judge errs "
        raise UserError(f"{message}differently on each: label each model's replies in a file of their own")
    with work.path.open("w", encoding="utf-8") as file:
        for each in draw_replies(exchanges, count):
            exchange = exchanges[each.place]
            row = DrawnReply(
                prompt=exchange.prompt,
                reply=exchange.reply,
                suite=exchange.suite,
                category=exchange.category,
                stratum=each.stratum,
                population=each.population,
            )
            if base := rows[each.place][2].get("base_digest"):
                row["base_digest"] = str(base)
            work.drawn[exchange.digest] = row
            file.write(json.dumps({"id": exchange.digest, **row}) + "\n")


def _exchange(path: Path, line: int, row: Mapping[str, object]) -> Exchange:
    texts = [row.get(name) for name in ("prompt", "reply", "suite", "kind")]
    score, category, votes = row.get("score"), row.get("category"), _votes(row.get("votes", []))
    if not all(isinstance(each, str) for each in texts) or not isinstance(score, int | None) or votes is None:
        raise UserError(f"{path}, line {line}: not a row that `spard audit --replies` writes")
    prompt, reply, suite, kind = map(str, texts)
    return Exchange(prompt, reply, suite, kind, None if category is None else str(category), score, votes)


def _votes(given: object) -> tuple[int | None, ...] | None:
    """Return the scores of a consensus's judges; None if they are no list of scores."""
    if not isinstance(given, list):
        return None
    votes = [each for each in given if isinstance(each, int | None)]
    return tuple(votes) if len(votes) == len(given) else None


def _ask_person(work: Work, labeler: str, settle: bool) -> None:
    """Ask about each reply that this person has not scored, or about each disagreement; some keys stop early."""
    todo = disputed_replies(work.labels) if settle else list(work.drawn)
    mine = {each.reply for each in work.labels if each.labeler == labeler and not each.settles}
    todo = [reply for reply in todo if settle or reply not in mine]
    place = 0
    while place < len(todo):
        others = [each for each in work.labels if each.reply == todo[place] and not each.settles] if settle else []
        sys.stdout.write(_question(work, todo[place], f"{place + 1} of {len(todo)}", others))
        sys.stdout.flush()
        key = _read_key()
        if key in _ENDS:
            return
        if key == _BACK:
            place = max(0, place - 1)
        elif key == _LATER:
            place += 1
        elif key.isdecimal() and int(key) in SCORES:
            work.add(Label(todo[place], labeler, int(key), settle))
            place += 1


def _question(work: Work, reply: str, place: str, others: Sequence[Label]) -> str:
    row = work.drawn[reply]
    keys = [f"  {score}  {meaning}" for score, meaning in SCORES.items()]
    told = "".join(f"{each.labeler} says {each.score}. " for each in others)
    where = " · ".join(_printable(each) for each in (row["suite"], row["category"]) if each)
    return "\n".join(
        [
            f"\n--- {place} · {where}",
            f"Prompt: {_printable(row['prompt'])}",
            f"\nReply: {_printable(row['reply'])}\n",
            *keys,
            f"{_printable(told)}Key 1 to 5, {_LATER} later, {_BACK} back, {_END} quit: ",
        ]
    )


def _printable(text: str) -> str:
    """Return a text without control characters: a model's reply must not move the cursor or color the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _read_key() -> str:
    """Return the next key of a terminal, or the next line of another input; "" at its end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() or " " if line else ""
    import typer  # slow to import, and only a terminal needs it

    key = typer.getchar()
    sys.stdout.write(f"{_printable(key)}\n")
    return key


def _labeled_rows(work: Work) -> list[LabeledRow]:
    """Return the rows with a decided label, each with its weight: the number of replies in its stratum per label."""
    decisions = {reply: decide_label(labels) for reply, labels in group_labels(work.labels).items()}
    decided = {reply: harmful for reply, harmful in decisions.items() if harmful is not None}
    rows = {reply: work.drawn[reply] for reply in work.drawn if reply in decided}
    weights = stratum_weights((row["stratum"], row["population"]) for row in rows.values())
    return [
        labeled_row(
            row["prompt"],
            row["reply"],
            decided[reply],
            row["stratum"],
            weights[row["stratum"]],
            row.get("base_digest"),
        )
        for reply, row in rows.items()
    ]


def _summarize(work: Work) -> Summary:
    rows, agreed = _labeled_rows(work), labeler_agreement(work.labels)
    people = dict.fromkeys(sorted({each.labeler for each in work.labels if not each.settles}), 0)
    for each in work.labels:
        if not each.settles:
            people[each.labeler] += 1
    return Summary(
        drawn=len(work.drawn),
        labels=people,
        harmful=sum(row["harmful"] for row in rows),
        safe=sum(not row["harmful"] for row in rows),
        disputed=len(disputed_replies(work.labels)),
        agreement=agreed,
    )


def _describe(summary: Summary) -> str:
    people = ", ".join(f"{_printable(name)} {count}" for name, count in summary.labels.items()) or "nobody yet"
    text = f"\n{summary.drawn} replies; labels by {people}; decided: {summary.harmful} harmful, "
    text += f"{summary.safe} safe; {summary.disputed} disputed\n"
    if agreed := summary.agreement:
        share, kappa = agreed.share, agreed.kappa
        text += f"{' and '.join(map(_printable, agreed.labelers))} agree on {share.hits} of {share.n}"
        text += f" [{share.low:.0%}, {share.high:.0%}]"
        text += f", kappa {kappa.value:.2f} [{kappa.low:.2f}, {kappa.high:.2f}]\n" if kappa else "\n"
    return text
