"""`spard measure-agent REPORT...`: measure how often an auditing agent takes clean jobs for harmful ones.

Reads safety reports of jobs that the provider knows to be clean, with the agent's scores. Exits 2 if the agent may not
decide at the given score.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spard.commands import exits
from spard.commands.front import Asked
from spard.errors import InvalidRecipe, SpardError
from spard.evaluation.calibration.errors import AgentErrors
from spard.release.report import SafetyReport


def execute(asked: Asked) -> int:
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
    """Return the scores of the one agent in all these reports; raise `InvalidRecipe` if a report is unfit."""
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
