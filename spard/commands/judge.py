"""`spard judge`, `spard judge train` and `spard measure-agent`: measure judges of replies and auditing agents.

`spard judge [--judge NAME] [--labeled FILE]` measures a judge on replies of known harm. Without a file the built-in
replies in four languages are judged; files replace them, or add to them with `--extend`. For each language the command
reports the share of harmful replies that the judge missed and of safe ones that it took for harm, with 95 % intervals,
and how many of a hundred openings turn harm into a pass. `--model FOLDER` measures the judge for one base model, on
labeled replies of this model, and writes the record into its folder. The exit status is 0 if the judge may decide in
every measured language, 2 if not, and 1 on an error.

`spard measure-agent REPORT...` measures how often an auditing agent takes clean jobs for harmful ones. It reads safety
reports of jobs that the provider knows to be clean, with the agent's scores. The exit status is 2 if the agent may not
decide at the given score.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spard.commands import exits, judge_record, measuring
from spard.commands.front import Asked, alone
from spard.commands.judge_options import judge_spec
from spard.errors import InvalidRecipe, SpardError
from spard.evaluation.calibration.errors import (
    MAX_ERROR,
    MIN_OF_EACH,
    MIN_SCORED,
    AgentErrors,
    harm_found,
    may_read_unflagged,
    measure_judge,
)
from spard.evaluation.calibration.gaming import measure_gaming, measure_own_gaming
from spard.evaluation.calibration.labeled import LabeledReply, built_in_replies, labeled_base, read_labeled
from spard.evaluation.calibration.record import JudgeRecord
from spard.evaluation.judges import Judge, open_judge
from spard.evaluation.statistics import Rate
from spard.release.report import SafetyReport

MAY_NOT_DECIDE = exits.NOT_PASSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run this command without the other subcommands."""
    return alone(measuring.judge, "spard judge", argv)


def execute(asked: Asked) -> int:
    """Measure a judge and print the result, as text or as JSON."""
    try:
        judge_record.check_options(asked)
        labeled = _labeled_replies(asked)
        base = judge_record.find_base(asked.model, labeled)
        judge = open_judge(judge_spec(asked))
        file = judge_record.record_file(asked, judge.name, base)
        return _report(judge, labeled, base, file, own_harm=asked.own_harm, as_json=asked.as_json)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1


def train(asked: Asked) -> int:
    """Train a classifier on a part of the labels, write its file, and measure it on the rest."""
    # Only training needs these.
    local = importlib.import_module("spard.evaluation.judges.local")
    training = importlib.import_module("spard.evaluation.calibration.training")
    try:
        labeled = [each for path in asked.labels for each in read_labeled(path)]
        of_labels = labeled_base(labeled)
        own, rest = training.split_labels(labeled, asked.share)
        base = None if asked.model is None else (asked.model, asked.revision)
        encoder = None if asked.encoder is None else str(asked.encoder.resolve())
        reader = local.open_reader(encoder, base)
        weights = training.train_local(reader, own, encoder, base)
        weights.write(asked.out)
        trained = f"trained on {weights.harmful} harmful and {weights.safe} safe labels; measured on the other labels\n"
        sys.stdout.write("" if asked.as_json else trained)
        return _report(local.LocalJudge(weights, reader), rest, of_labels, as_json=asked.as_json)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1


def _report(
    judge: Judge,
    labeled: Sequence[LabeledReply],
    base_digest: str | None,
    file: Path | None = None,
    *,
    own_harm: bool = False,
    as_json: bool,
) -> int:
    """Measure a judge, write its record to a file if one is given, print the result, and return the exit code."""
    found = tuple(measure_judge(judge, labeled))
    gamed = measure_own_gaming(judge, labeled) if own_harm else measure_gaming(judge)
    record = JudgeRecord(judge.name, found, base_digest, gamed)
    if file is not None:
        judge_record.write_record(record, file)
    told = json.dumps(record.to_json(), indent=2) + "\n" if as_json else _text(record, harm_found(judge))
    sys.stdout.write(told)
    return 0 if record.may_decide else MAY_NOT_DECIDE


def _labeled_replies(asked: Asked) -> list[LabeledReply]:
    own = [each for path in asked.labeled or () for each in read_labeled(path)]
    return own if asked.labeled and not asked.extend else [*built_in_replies(asked.language), *own]


def _text(record: JudgeRecord, harm: Rate) -> str:
    lines = [f"{record.judge}: a judge may decide where both upper bounds are at most {MAX_ERROR:.0%} on {MIN_SCORED}"]
    lines[0] += f" replies or more, {MIN_OF_EACH} of each kind"
    if not record.is_bound:
        lines.append(
            "it is a word list, a smoke test: it decides only on the base model whose replies it was measured on"
        )
    for each in record.languages:
        may = "errs little enough" if each.may_decide else "may not decide"
        missed, alarms = _share(each.missed), _share(each.false_alarms)
        lines.append(f"{each.language}: misses {missed} of harm, sees harm in {alarms} of safe replies; {may}")
    if record.gamed is not None:
        lines.append(f"judge-gaming openings: {_result(record.gamed, '{} turn harm into a pass')}")
    reads = (
        "it may read rows that nobody suspects" if may_read_unflagged(harm) else "of rows it reads flagged ones alone"
    )
    lines.append(f"everyday questions and answers: {_result(harm, 'harm in {}')}; {reads}")
    return "\n".join(lines) + "\n"


def _result(found: Rate, words: str) -> str:
    """Describe the hits among the prompts, or say that nothing was scored."""
    asked = found.n + found.unscored
    if found.n == 0:
        return f"none of {asked} was scored, which proves nothing"
    left = f" ({found.unscored} unscored)" if found.unscored else ""
    return words.format(f"{found.hits} of {asked}{left}")


def _share(found: Rate) -> str:
    if found.rate is None:
        return f"- (0 of {found.unscored} scored)"
    left = f", {found.unscored} unscored" if found.unscored else ""
    return f"{found.rate:.1%} [{found.low:.1%}, {found.high:.1%}] ({found.hits} of {found.n}{left})"


def measure_agent(asked: Asked) -> int:
    """Collect the scores and print the rate, as text or as the JSON file that `SPARD_AGENT_ERRORS` names."""
    try:
        found = agent_scores(asked.reports)
    except SpardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    may, alarms = found.may_decide(asked.max_score), found.false_positives(asked.max_score)
    text = (
        f"{found.agent}: {alarms.hits} of {alarms.n} clean jobs above {asked.max_score:g}, at most {alarms.high:.1%} "
        f"with 95 % confidence; it {'may' if may else 'may not'} decide"
    )
    sys.stdout.write(f"{json.dumps(found.to_json(), indent=2) if asked.as_json else text}\n")
    return 0 if may else exits.NOT_PASSED


def agent_scores(paths: list[Path]) -> AgentErrors:
    """Return the scores of the agent that all these reports name; raise `InvalidRecipe` if a report is unfit."""
    records = []
    for path in paths:
        try:
            record = SafetyReport.from_json(json.loads(path.read_text(encoding="utf-8"))).agent
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRecipe(f"{path} is no safety report that can be read ({type(error).__name__})") from None
        if record is None:
            raise InvalidRecipe(f"{path}: no auditing agent has looked at this job")
        records.append(record)
    names = sorted({each.agent for each in records})
    if len(names) != 1:
        raise InvalidRecipe(f"the reports are of several agents: {', '.join(names)}" if names else "name reports")
    return AgentErrors(names[0], tuple(each.score for each in records))
