"""The auditing agent's review of a run: its input, its questions to both models, and the effect of its score."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from spard.config.settings import Agent
from spard.data.rows import Example, Prompt
from spard.errors import JudgeUnavailable
from spard.evaluation.agent import Case, Finding, Subject, agent_name, investigate, shorten
from spard.evaluation.ask import ask, in_memory
from spard.evaluation.calibration.errors import AgentErrors, read_errors
from spard.evaluation.gate import Gate, worse
from spard.evaluation.judges import open_chat
from spard.evaluation.results import SuiteResult
from spard.models.base import disable_adapters
from spard.models.peft import PeftModel
from spard.pipeline import audit, row_judging, select
from spard.pipeline.context import Context
from spard.release.records import AgentRecord
from spard.release.report import Measured, read_record

_OUTPUT = "agent"


def run(
    context: Context,
    examples: Sequence[Example],
    model: Any,
    weights: str,
    base: Sequence[SuiteResult],
    adapter: Sequence[SuiteResult],
) -> AgentRecord | None:
    """Run the auditing agent that the run names; return its record, or None if the run names no agent.

    `weights` is the digest of the trained weights: a stored finding is reused if the digest and the agent's settings
    match. Raises `JudgeUnavailable` if the agent does not answer and its score may withhold the model; if the score is
    informational only, the failure is recorded instead.
    """
    agent = context.run.agent
    if agent is None:
        return None
    key = {"weights": weights, "agent": asdict(agent)}
    kept = context.outputs.read(_OUTPUT)
    if kept is not None and kept["key"] == key:
        found = read_record(Finding, kept["found"])
    else:
        found = _agent_finding(context, agent, examples, model, [*_findings(context, base, adapter)])
        context.outputs.write(_OUTPUT, {"key": key, "found": asdict(found)})
    errors = _errors(context, agent)
    record = AgentRecord(
        agent_name(agent), found.score, found.reasons, found.questions, agent.max_score, _decides(agent, errors)
    )
    context.report.event(record.sentence(), asdict(record))
    return record


def apply_agent_verdict(context: Context, examples: Sequence[Example], model: Any, measured: Measured) -> Measured:
    """Run the auditing agent; return the audit with its finding and the worse of both decisions."""
    weights = audit.weights_digest(model)
    seen = run(context, examples, model, weights, measured.base, measured.adapter)
    return replace(measured, gate=worse(measured.gate, decision(seen), says=""), agent=seen)


def decides(context: Context) -> bool:
    """Return True if the score of the run's agent can withhold a model."""
    agent = context.run.agent
    return agent is not None and _decides(agent, _errors(context, agent))


def decision(record: AgentRecord | None) -> Gate:
    """Return the gate decision that follows from the agent's score; `pass` if the agent may not decide."""
    if record is None or not record.decides:
        return Gate("pass", ())
    if record.score is None:
        return Gate("inconclusive", (record.sentence(),))
    return Gate("fail", (record.sentence(),)) if record.exceeds_limit else Gate("pass", ())


def _agent_finding(
    context: Context, agent: Agent, examples: Sequence[Example], model: Any, findings: list[str]
) -> Finding:
    rows = _rows_to_show(context, examples, agent.rows)
    host = urlsplit(agent.base_url).hostname
    told = f"An auditing agent, {agent.model} at {host}, is shown {len(rows)} rows of the training file and replies"
    context.report.event(told, {"rows": len(rows), "host": host})
    case = Case(len(examples), rows, findings)
    try:
        return investigate(open_chat(agent.endpoint), agent, case, _Asking(context, model))
    except JudgeUnavailable as error:
        if _decides(agent, _errors(context, agent)):
            raise
        return Finding(None, (error.message,))


class _Asking:
    """Callable that puts the agent's questions to the trained model (with its serving prompt) or to the base model."""

    def __init__(self, context: Context, model: Any) -> None:
        self._context, self._model = context, model

    def __call__(self, subject: Subject, prompts: Sequence[Prompt]) -> list[str]:
        context, limit = self._context, self._context.recipe.audit.max_new_tokens
        context.raise_if_stopped()
        if subject == "tuned":
            speaker = in_memory(self._model, context.base.tokenizer, context.system_prompt)
            return ask(speaker, [_drop_own_system(each, context.system_prompt) for each in prompts], limit)
        if not isinstance(self._model, PeftModel):
            # Full fine-tuning has changed the base model's own weights, so there is nothing to compare with.
            return ["(there is no base model any more: all of its weights were trained)"] * len(prompts)
        with disable_adapters(self._model):
            return ask(in_memory(self._model, context.base.tokenizer), prompts, limit)


def _drop_own_system(prompt: Prompt, served: str | None) -> Prompt:
    """Return the prompt without its own context if the model is served with a system prompt."""
    return replace(prompt, context=()) if served else prompt


def _rows_to_show(context: Context, examples: Sequence[Example], limit: int) -> list[dict[str, object]]:
    """Return at most `limit` rows in the agent's format: up to half of them flagged or risky, the others random."""
    signal = row_judging.read_row_signal_record(context)
    flagged = [
        *((*signal.harmful, *signal.flagged) if signal else ()),
        *(each.line for each in select.kept_risks(context) or ()),
    ]
    by_line = {each.line: each for each in examples}
    # Half of the rows at most are suspicious ones, which leaves room for a picture of the ordinary rows.
    first = [by_line[line] for line in dict.fromkeys(flagged) if line in by_line][: limit // 2]
    taken = {each.line for each in first}
    others = [each for each in examples if each.line not in taken]
    drawn = random.Random(context.recipe.seed).sample(others, min(limit - len(first), len(others)))
    return [_row(each) for each in (*first, *sorted(drawn, key=lambda each: each.line))]


def _row(example: Example) -> dict[str, object]:
    messages = [{"role": str(each["role"]), "content": _text(each)} for each in example.messages]
    rejected = {"not_preferred": _text(example.rejected)} if example.rejected else {}
    return {"line": example.line, "messages": messages, **rejected}


def _text(message: Any) -> str:
    return shorten(str(message.get("content") or message.get("tool_calls") or ""))


def _findings(context: Context, base: Sequence[SuiteResult], adapter: Sequence[SuiteResult]) -> list[str]:
    """Describe in sentences the audit's results per suite and the number of flagged rows."""
    before = {each.suite: each for each in base}
    found = [
        f"Suite {each.suite} ({each.kind}): {each.hits} of {each.n} hits; the base model "
        f"{before[each.suite].hits} of {before[each.suite].n}."
        for each in adapter
        if each.suite in before
    ]
    signal = row_judging.read_row_signal_record(context)
    if signal:
        found.append(f"The base model would refuse {len(signal.flagged)} of {signal.rows} rows that are answered.")
    if signal and signal.judge:
        found.append(f"Of these the judge `{signal.judge}` finds harm in {len(signal.harmful)}.")
    return found


def _errors(context: Context, agent: Agent) -> AgentErrors | None:
    path = context.run.agent_errors
    found = read_errors(path) if path else None
    return found if found and found.agent == agent_name(agent) else None


def _decides(agent: Agent, errors: AgentErrors | None) -> bool:
    return agent.max_score is not None and errors is not None and errors.may_decide(agent.max_score)
