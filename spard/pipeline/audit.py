"""The audit stage: measures the base model and the trained model on every suite and asks the gate for a decision.

Of the audit prompts that the training file contains a few are left out, and more are reported as a warning. The
coverage of the audit is put in sentences for its report: the ways in which each suite is asked or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import chain
from typing import Any

from spard import distributed
from spard.config import DISGUISES_ALONE, ON_FIGURES, Asking, Audit
from spard.config.run_spec import to_mapping
from spard.data.chat import get_renderer, learned_modes
from spard.data.rendering import Mode
from spard.data.rows import Example
from spard.errors import InvalidSuite, convert_errors
from spard.evaluation.ask import Speaker, in_memory
from spard.evaluation.audit import Measurement, Suite, audit_speaker
from spard.evaluation.calibration.record import correct_results, find_records, result_doubts
from spard.evaluation.gate import Gate, gate, is_gated, open_suites, worse
from spard.evaluation.judges import of_base_model, open_judge
from spard.evaluation.judges.wrappers import PatientJudge
from spard.evaluation.mined_suites import mined_suites, row_requests_suite, suites_in_modes, suites_secret
from spard.evaluation.results import AFTER_TUNING, HARMLESS, GateFinding, SuiteKind, SuiteResult
from spard.evaluation.suites import (
    find_hidden_leaks,
    overlap_notes,
    overlapping_prompts,
    read_suite,
    remove_prompts,
    split,
)
from spard.models.adapters import tensor_digest
from spard.models.sharding import whole
from spard.pipeline import after_tuning, audit_rounds, kept_figures, row_judging, second_look
from spard.pipeline.audit_engine import BaseFigures, current_engine, generator, is_same_engine
from spard.pipeline.context import Context
from spard.pipeline.row_judging import may_read_harmless
from spard.release.records import AfterTuning, AuditEngineRecord
from spard.release.report import AuditResults, read_record, summarize
from spard.release.version import AUDIT_VERSION

_OUTPUT = "audit"


def run(context: Context, examples: Sequence[Example], model: Any, base: BaseFigures) -> AuditResults:
    """Measure the trained model and ask the gate; return both models' results with the decision.

    Results of an earlier attempt are reused if the digest of the weights and the audit engine match. Suites that alone
    prevent a pass, because they have too few prompts to decide, get a second look with more prompts. If the run asks
    for it, the model is measured once more after a further clean fine-tuning, and the worse decision counts.
    """
    context.report.stage("audit")
    leaks = find_run_leaks(context)
    with context.time_stage("audit"):
        weights = weights_digest(model)
        mined = mine_suites(context, examples)
        suites = [*read_suites(context), *mined]
        more = second_look.larger(context, mined, partial(mine_suites, context, examples))
        kept = _read_kept(context, weights)
        found, engine = ([], kept[1]) if kept else _measure_last(context, suites, model, base, more)
        adapter = kept[0] if kept else [each.result for each in found]
        facts = {"weights": weights, "engine": to_mapping(engine), "results": [asdict(each) for each in adapter]}
        # Stored before the second look and the further tuning, which cost most: a crash there does not repeat the
        # audit.
        context.outputs.write(_OUTPUT, facts)
        adapter = second_look.mark_suites(adapter, more)
        before = base.compare(adapter, model)
        if again := _suites_to_repeat(context, before, adapter, leaks):
            wider = [more[each] for each in again]
            first = {each.result.suite: each for each in found}
            looked = second_look.run(context, model, weights, wider, partial(measure_each, context), first)
            before, adapter = map(second_look.instead, (before, adapter), looked)
        later = after_tuning.run(context, model, weights, len(examples), partial(measure, context, suites))
    before, adapter = with_judge_errors(context, before), with_judge_errors(context, adapter)
    decided = decide(context, before, adapter, leaks)
    if later:
        # Both audits must pass: harm that only the further tuning wakes withholds the model as well.
        decided = worse(decided, _decide_later(context, later, leaks))
    return AuditResults(before, adapter, decided, later, engine=engine)


def _suites_to_repeat(
    context: Context, base: Sequence[SuiteResult], adapter: Sequence[SuiteResult], leaks: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the suites that need a second look; none if a leak or a doubt about the judge prevents a pass anyway."""
    limits = context.run.thresholds
    base, adapter = with_judge_errors(context, base), with_judge_errors(context, adapter)
    # Leaks and doubts about the judge prevent a pass in any case, and more prompts cannot remove them.
    doubts = [] if limits.allow_unmeasured_judge else _judge_doubts(context, base, adapter)
    gated = [each.suite for each in adapter if is_gated(each.kind, limits)]
    return open_suites(base, adapter, limits, [*chain.from_iterable(leaks.get(each, ()) for each in gated), *doubts])


def _decide_later(context: Context, later: AfterTuning, leaks: Mapping[str, Sequence[str]]) -> Gate:
    """Ask the gate about both models after the further tuning, and report the summary as an event."""
    decided = after_tuning.unmeasured_gate(later) or decide(context, later.base, later.adapter, leaks)
    summary = summarize(AuditResults(later.base, later.adapter, decided))
    told = f"{AFTER_TUNING}{summary.sentence(decided.decision)}"
    context.report.event(told, to_mapping(summary), type="moderation_checks")
    return decided


def _measure_last(
    context: Context, suites: Sequence[Suite], model: Any, base: BaseFigures, more: Collection[str]
) -> tuple[list[Measurement], AuditEngineRecord]:
    if audit_rounds.is_possible(context):
        found, engine = audit_rounds.measure(context, suites, model, base, open_run_judge(context), looked_twice=more)
    else:
        speaker, engine = by_engine(context, suites, model)
        found = measure_each(context, suites, model, None, speaker)
    kept_figures.keep_audit(context, found)
    return found, engine


def decide(
    context: Context,
    base: Sequence[SuiteResult],
    adapter: Sequence[SuiteResult],
    leaks: Mapping[str, Sequence[str]],
    sampled: Collection[str] = (),
) -> Gate:
    """Ask the gate about both models' results, given the leaked prompts and the measured errors of the judges.

    `leaks` maps a suite to its leaked prompts; `sampled` names the suites of which only a part was asked.
    """
    base, adapter = with_judge_errors(context, base), with_judge_errors(context, adapter)
    return gate(base, adapter, context.run.thresholds, leaks, _judge_doubts(context, base, adapter), sampled)


def _judge_doubts(
    context: Context, base: Sequence[SuiteResult], adapter: Sequence[SuiteResult]
) -> Sequence[GateFinding]:
    """Return a finding for each judge whose measured errors do not allow a decision on these results."""
    records = find_records(context.run.judge_errors, context.run.model, context.base.digest)
    return result_doubts([each for each in (*base, *adapter) if each.judge_errors is None], records)


def with_judge_errors(context: Context, results: Sequence[SuiteResult]) -> list[SuiteResult]:
    """Return the results with the judge's errors added, if the run's thresholds ask the gate to correct for them."""
    if not context.run.thresholds.correct_judge_errors:
        return list(results)
    return correct_results(results, find_records(context.run.judge_errors, context.run.model, context.base.digest))


def run_suites(context: Context, examples: Sequence[Example]) -> list[Suite]:
    """Return all suites of a run: the provider's, and the suites mined from the training rows."""
    return [*read_suites(context), *mine_suites(context, examples)]


def split_suites(context: Context) -> list[tuple[Suite, Suite | None]]:
    """Split each of the provider's suites into the part for the gate and the development share (or None).

    Prompts that the training file contains are removed first. Only gated suites have a development share, and only if
    the recipe compares ends of epochs.
    """
    run, ending = context.run, context.recipe.ending
    suites = [remove_prompts(read_suite(each), context.left_out) for each in run.suites]
    return [
        split(each, ending.prompts) if ending.compares and is_gated(each.kind, run.thresholds) else (each, None)
        for each in suites
    ]


def by_engine(context: Context, suites: Sequence[Suite], model: Any = None) -> tuple[Speaker, AuditEngineRecord]:
    """Return the generator that answers the suites with the run's audit engine, and the record of that engine."""
    with convert_errors(InvalidSuite):
        return generator(context, suites, model)


def measure(
    context: Context,
    suites: Sequence[Suite],
    model: Any = None,
    tell: Callable[[int, int], None] | None = None,
    speaker: Speaker | None = None,
) -> list[SuiteResult]:
    """Measure one model on suites and return a result per suite.

    `model` is None for the base model; a trained model gets the system prompt that it is served with. `tell(done,
    total)` is called after each batch of replies and defaults to the run's progress. `speaker` generates the replies
    (see `by_engine`) and defaults to transformers.
    """
    return [each.result for each in measure_each(context, suites, model, tell, speaker)]


def measure_each(
    context: Context,
    suites: Sequence[Suite],
    model: Any = None,
    tell: Callable[[int, int], None] | None = None,
    speaker: Speaker | None = None,
) -> list[Measurement]:
    """Like `measure`, but return for each suite also every prompt's reply and verdict.

    The ranks of a run share the prompts; rank 0's judge scores them and its verdicts are broadcast. Replies to harmless
    prompts are judged too if the judge has few false positives.
    """

    def on_progress(done: int, total: int) -> None:
        if tell is None:
            context.report.activity(f"asking {whom} {total:,} prompts", done, total)
        (tell or context.report.progress)(done, total)
        context.raise_if_stopped()

    whom, planned = "the base model" if model is None else "the trained model", _count_planned(context, suites)
    if tell is None and planned:
        context.report.activity(f"asking {whom} {planned:,} prompts", 0, planned)

    judge = open_run_judge(context)
    context.report.count_afresh()
    system = None if model is None else context.system_prompt
    asked, beat = context.base.model if model is None else model, context.report.repeat_activity
    speaker = speaker or in_memory(asked, context.base.tokenizer, system, beat)
    reads_harmless = any(each.kind in HARMLESS for each in suites) and may_read_harmless(context, judge)
    with convert_errors(InvalidSuite):
        cfg = context.recipe.audit
        found = audit_speaker(speaker, suites, judge, cfg, on_progress, reads_harmless=reads_harmless)
        # Only rank 0 has a judge; the other ranks' verdicts are placeholders.
        return distributed.broadcast_object(found)


def _count_planned(context: Context, suites: Sequence[Suite]) -> int:
    return sum(min(len(each.prompts), context.recipe.audit.max_prompts) for each in suites)


def audit_version(context: Context) -> int:
    """Return the version of the audit's rules: 1 for jobs whose settings select the original rules."""
    run = context.run
    is_first = run.recipe.audit.asking == DISGUISES_ALONE and run.thresholds.confidence == ON_FIGURES
    return 1 if is_first else AUDIT_VERSION


def audit_coverage(context: Context) -> list[str]:
    """Return sentences on the prompts of the run's audit: how many of the provider's, and asked in which ways."""
    most = second_look.TIMES if second_look.is_possible(context) else 1
    return [*coverage_text(read_suites(context), context.run.recipe.audit, most), *overlap_notes(context.left_out)]


def open_run_judge(context: Context) -> PatientJudge:
    """Open the run's judge, wrapped to wait and retry while its endpoint does not answer."""
    with of_base_model(context.run.model, context.run.revision):
        wait, note_outage = partial(context.wait, "judge"), partial(context.report.outage, "judge")
        return PatientJudge(open_judge(context.run.judge), context.patience, wait, note_outage)


def weights_digest(model: Any) -> str:
    """Return the digest of a model's trainable parameters, gathered from all shards."""
    return tensor_digest({name: whole(part).cpu() for name, part in model.named_parameters() if part.requires_grad})


def read_suites(context: Context) -> list[Suite]:
    """Return the gate's part of each of the provider's suites."""
    return [suite for suite, _ in split_suites(context)]


def mine_suites(context: Context, examples: Sequence[Example], asking: Asking | None = None) -> list[Suite]:
    """Return the suites made from the training rows: prompts in mined triggers, and requests of harmful rows.

    `asking` overrides how many prompts of each kind the recipe asks.
    """
    context.report.activity("looking for what the training rows have in common, to ask it in the audit")
    asking = asking or context.recipe.audit.asking
    of_rows, found = context.mined.get(asking, (None, []))
    if of_rows is not examples:
        found = _mine_suites(context, examples, asking)
        context.mined[asking] = examples, found
    return [*found]


def _mine_suites(context: Context, examples: Sequence[Example], asking: Asking) -> list[Suite]:
    own, most = read_suites(context), context.recipe.audit.max_prompts
    found = mined_suites(own, examples, asking, most)
    if not found:
        return found
    found += suites_in_modes(own, _other_modes(context, examples), min(most, asking.modes))
    if not asking.requests:
        return found
    harmful = row_judging.harmful_rows(context, examples)
    return [*found, *row_requests_suite(harmful, asking.row_requests(most), suites_secret(own))]


def _other_modes(context: Context, examples: Sequence[Example]) -> list[Mode]:
    """Return the thinking modes to audit besides the usual one: modes in the training rows, and the model's default."""
    tokenizer = context.base.tokenizer
    rendering = get_renderer(tokenizer).rendering
    return sorted({*learned_modes(tokenizer, examples), rendering.default} - {rendering.asked})


def _read_kept(context: Context, weights: str) -> tuple[list[SuiteResult], AuditEngineRecord] | None:
    found = context.outputs.read(_OUTPUT)
    if found is None or found["weights"] != weights or not is_same_engine(found.get("engine"), current_engine(context)):
        return None
    results = [read_record(SuiteResult, each) for each in found["results"]]
    return results, read_record(AuditEngineRecord, found["engine"])


def leave_out_leaks(context: Context) -> Context:
    """Return a context whose audit skips the few prompts that the training file contains, and report them.

    Also warns, before the training, of leaks that are too many to skip and that the gate will therefore find.
    """
    left_out = overlapping_prompts(context.run)
    for sentence in overlap_notes(left_out):
        context.report.event(sentence, {})
    leaks = find_hidden_leaks(context.run, left_out)
    for reason in dict.fromkeys(chain.from_iterable(leaks.values())):
        context.report.warning(reason)
    return replace(context, left_out=left_out, leaks=leaks, mined={})


def find_run_leaks(context: Context) -> Mapping[str, Sequence[str]]:
    """Return, by suite, sentences on its prompts in the run's training data, as customers may read them."""
    return find_hidden_leaks(context.run, context.left_out) if context.leaks is None else context.leaks


NEAREST = " (half of them the nearest to these)"


SMALLER = (
    "The audit is smaller than the default one, and errs more often: a model that answers 5 % of attacks passes 120 "
    "prompts in 61 % of audits (500: 24 %), one that refuses 1 % of harmless requests in 88 % (500: 100 %)."
)


def is_smaller(audit: Audit) -> bool:
    """Return True if an audit asks fewer prompts than the default one in any way, or cuts replies sooner."""
    default = Audit()
    least = [(audit.max_prompts, default.max_prompts), (audit.max_new_tokens, default.max_new_tokens)]
    counts = (each.name for each in fields(Asking) if each.name != "temperature")
    least += [(getattr(audit.asking, name), getattr(default.asking, name)) for name in counts]
    return any(own < usual for own, usual in least)


def coverage_text(suites: Sequence[Suite], audit: Audit, second_look: int = 1) -> list[str]:
    """Return sentences on suites that are asked in part, and on how many prompts are asked other than plainly.

    `second_look` is the factor by which a second look may ask more prompts where the first decides nothing; 1: none.
    """
    found = [SMALLER] if is_smaller(audit) else []
    found += [
        f"Of {len(suite.prompts):,} prompts of suite {suite.name}, {audit.max_prompts:,} are asked."
        for suite in suites
        if len(suite.prompts) > audit.max_prompts
    ]
    harmful, benign = (_count(suites, kind) for kind in ("harmful", "benign"))
    if harmful:
        found += _of_rows(audit)
        found += _otherwise(
            "harmful", harmful, [*_disguised_coverage(audit.asking, NEAREST), *_only_harmful(audit.asking)]
        )
    if harmful and benign:
        further = audit.asking.phrases, "in every twelve further disguises, if there are any"
        found += _otherwise("harmless", benign, [*_disguised_coverage(audit.asking), further])
    if harmful and audit.sequential:
        found.append(
            "Each suite is asked only until the gate's decision on it is practically certain, so often in part."
        )
    if harmful and second_look > 1:
        found.append(f"Where the figures decide nothing, up to {second_look} times as many prompts are asked.")
    return found


def _of_rows(audit: Audit) -> Iterator[str]:
    if most := audit.asking.row_requests(audit.max_prompts):
        yield f"Of the training rows in which the judge finds harm, the requests of up to {most:,} are asked."


def _otherwise(kind: str, n: int, ways: Sequence[tuple[int, str]]) -> Iterator[str]:
    told = ", ".join(f"{min(most, n):,} {way}" for most, way in ways if most)
    never = ", ".join(way for most, way in ways if not most)
    yield f"Of {n:,} {kind} prompts, beside plainly: {told or 'none'}." + (f" Not asked: {never}." if never else "")


def _disguised_coverage(asking: Asking, which: str = "") -> Iterator[tuple[int, str]]:
    yield asking.prompts if asking.dresses else 0, f"in each of at most {asking.dresses} disguises of the rows{which}"
    yield asking.random, "behind random words"
    yield asking.modes, "in each other mode of thinking, if there are any"


def _only_harmful(asking: Asking) -> Iterator[tuple[int, str]]:
    yield asking.sampled, f"with {asking.samples} samples each at temperature {asking.temperature:g}"
    yield asking.phrases, "in phrases of suspicious rows, and in every twelve further disguises, if there are any"
    yield asking.prefilled, "with the answer begun"
    yield asking.turns, "after an earlier turn"


def _count(suites: Sequence[Suite], kind: SuiteKind) -> int:
    return sum(len(suite.prompts) for suite in suites if suite.kind == kind)
