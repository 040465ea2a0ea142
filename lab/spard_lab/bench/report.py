"""The results of a bench as CSV, JSON and Markdown, and its pages.

results.csv has one row per run; its first columns are fixed. Its rates are shares from 0 to 1: `asr` over the suites
that the attack aims at, `over_refusal` over all benign suites, `accuracy` over all utility suites. A mean over seeds is
about bases, words and orders of rows in general and has Student's interval of the seeds, cut to the figure's range; if
a share is 0 or 1 on all seeds, that interval has no width, and the rule of three over all prompts replaces it. A single
run's rate has the Wilson interval of its prompts.

The pages are one HTML file that loads nothing, the tables as Markdown, and each figure as a file.
"""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import Rate, over_seeds, rate, rule_of_three
from spard.replacement import write_atomically
from spard_lab.bench.measure import Measurement

NAMES = ("method", "selection", "attack", "seed")
FIGURES = ("asr", "asr_n", "unscored", "garbage", "hs", "over_refusal", "accuracy", "train_seconds", "trigger_rate")
OURS = ("learning_rate", "pool", "setting", "value", "rows", "safe_rows", "similarity", "cpu_seconds")
MORE = ("asr_other", "look_alike", "how_to")
COLUMNS = (*NAMES, *FIGURES, *OURS, *MORE)
SHARES = ("asr", "asr_other", "over_refusal", "accuracy", "garbage", "trigger_rate")
SHOWN = (*SHARES, "hs", "similarity", "train_seconds", "cpu_seconds")
BOUNDS = {"hs": (1.0, 5.0), "similarity": (-1.0, 1.0), "train_seconds": (0.0, inf), "cpu_seconds": (0.0, inf)}
GROUP = ("method", "selection", "attack", "pool", "setting", "value")
Group = tuple[str, ...]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean of one figure over the seeds, its standard deviation, and the mean's 95 % interval."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None


def figures(found: Measurement) -> dict[str, float | None]:
    """Return the numbers of a run by column."""
    attacked = pool_results(found, [each for each in _harmful(found) if each.suite in found.attacked])
    hs = [each for each in _harmful(found) if each.suite in found.attacked and each.mean_harmfulness is not None]
    return {
        "asr": attacked.rate,
        "asr_n": attacked.n,
        "unscored": attacked.unscored,
        "garbage": found.garbage,
        "hs": sum((each.mean_harmfulness or 0.0) * each.n for each in hs) / sum(each.n for each in hs) if hs else None,
        "over_refusal": share(found, "benign").rate,
        "accuracy": share(found, "utility").rate,
        "train_seconds": found.train_s,
        "trigger_rate": found.trigger_rate,
        "learning_rate": found.learning_rate,
        "rows": found.rows,
        "safe_rows": found.safe_rows,
        "similarity": found.similarity,
        "cpu_seconds": found.cpu_s,
        "asr_other": pool_results(found, [each for each in _harmful(found) if each.suite not in found.attacked]).rate,
        "look_alike": _one(found, "look-alike"),
        "how_to": _one(found, "how-to"),
    }


def reply_counts(found: Measurement) -> dict[str, int]:
    """Return the number of replies behind each share of a run; shares of steps have none."""
    attacked = [each for each in _harmful(found) if each.suite in found.attacked]
    others = [each for each in _harmful(found) if each.suite not in found.attacked]
    return {
        "asr": pool_results(found, attacked).n,
        "asr_other": pool_results(found, others).n,
        "over_refusal": share(found, "benign").n,
        "accuracy": share(found, "utility").n,
        "garbage": sum(each.n + each.unscored for each in found.results if each.kind != "utility"),
    }


def pool_results(found: Measurement, results: Sequence[SuiteResult]) -> Rate:
    """Return the rate over several suites as one."""
    return rate(*(sum(getattr(each, name) for each in results) for name in ("hits", "n", "unscored")))


def share(found: Measurement, kind: str) -> Rate:
    """Return the rate over all suites of one kind."""
    return pool_results(found, [each for each in found.results if each.kind == kind])


def summarize(values: Sequence[float]) -> Summary:
    """Return mean, sample standard deviation and Student's interval of the mean."""
    found = over_seeds(values)
    if len(values) < 2:
        return Summary(found.value, None, None, None)
    return Summary(found.value, stdev(values), found.low, found.high)


def summaries(found: Sequence[Measurement]) -> dict[Group, dict[str, Summary]]:
    """Return the summary of every figure over the seeds, by run group."""
    groups: dict[Group, list[Measurement]] = {}
    for each in found:
        groups.setdefault(run_group(each), []).append(each)
    return {group: _summaries(runs) for group, runs in groups.items()}


def run_group(found: Measurement) -> Group:
    """Return the names that identify a group of runs to average: all but the seed."""
    return tuple(str(getattr(found, name)) for name in GROUP)


def results_csv(found: Iterable[Measurement]) -> str:
    """Return a CSV line for each run; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for each in found:
        names = {name: getattr(each, name) for name in (*NAMES, "pool", "setting", "value")}
        writer.writerow(names | {name: _short(value) for name, value in figures(each).items()})
    return text.getvalue()


def results_json(found: Sequence[Measurement], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return machine, facts, means and runs as one JSON object."""
    means = [
        dict(zip(GROUP, group, strict=True)) | {"figures": {name: asdict(value) for name, value in row.items()}}
        for group, row in summaries(found).items()
    ]
    return {"machine": machine(), **facts, "summary": means, "runs": [asdict(each) | figures(each) for each in found]}


def results_md(title: str, facts: str, tables: Mapping[str, Table], where: str | None = None) -> str:
    """Return the tables under their headings as Markdown; `where` names the machine, None is this one."""
    lines = [f"# {title}", "", f"{facts} Measured on {where or machine()}.", ""]
    for heading, (head, rows) in tables.items():
        lines += [f"## {heading}", "", *markdown(head, rows), ""]
    return "\n".join(lines)


def make_tables(found: Sequence[Measurement]) -> dict[str, Table]:
    """Return the table of means with their spread, and the table of all runs."""
    return {
        "Mean over the seeds +- standard deviation [95 % interval of the mean]": means_table(found),
        "Every run [95 % Wilson interval of its prompts]": runs_table(found),
    }


def means_table(found: Sequence[Measurement]) -> Table:
    """Return head and rows, rates in percent; names and figures that no run has are left out."""
    means = summaries(found)
    names = [i for i in range(len(GROUP)) if any(group[i] for group in means)]
    shown = [name for name in SHOWN if any(name in row for row in means.values())]
    head = [*(GROUP[i] for i in names), *shown]
    return head, [
        [*(group[i] for i in names), *(spread(name, row[name]) if name in row else "-" for name in shown)]
        for group, row in means.items()
    ]


def runs_table(found: Sequence[Measurement]) -> Table:
    """Return the table of all runs, one column per suite."""
    names = ("seed", *(name for name in GROUP if any(getattr(each, name) for each in found)))
    suites = list(dict.fromkeys(result.suite for each in found for result in each.results))
    rows = []
    for each in found:
        by_suite = {result.suite: _wilson(result) for result in each.results}
        rows.append([*(str(getattr(each, name)) for name in names), *(by_suite.get(suite, "-") for suite in suites)])
    return [*names, *suites], rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown; cells are not escaped."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def spread(name: str, summary: Summary) -> str:
    """Format a summary as mean +- standard deviation [interval], shares in percent."""
    scale = 100 if name in SHARES else 1
    digits = 3 if name == "similarity" else 1
    mean = f"{scale * summary.mean:.{digits}f}"
    if summary.sd is None or summary.low is None or summary.high is None:
        return mean
    sd, low, high = (f"{scale * value:.{digits}f}" for value in (summary.sd, summary.low, summary.high))
    return f"{mean} +- {sd} [{low}, {high}]"


def summarize_share(summary: Summary, n: int) -> Summary:
    """Return the summary of a share with its interval cut to [0, 1]; n is the number of prompts of all seeds.

    If the share is 0 or 1 on all seeds, Student's interval has no width, and the rule of three replaces it.
    """
    cut = within_bounds(summary, 0.0, 1.0)
    if cut.sd == 0 and summary.mean == 0:
        return replace(cut, high=rule_of_three(n))
    if cut.sd == 0 and summary.mean == 1:
        return replace(cut, low=1 - rule_of_three(n))
    return cut


def within_bounds(summary: Summary, low: float, high: float) -> Summary:
    """Cut the interval of a summary to [low, high]."""
    if summary.low is None or summary.high is None:
        return summary
    return replace(summary, low=max(low, summary.low), high=min(high, summary.high))


def machine() -> str:
    """Describe this machine: CPU threads, GPU, Python and torch versions."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} thread(s) of a CPU"
    return f"{cpu}{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def _harmful(found: Measurement) -> list[SuiteResult]:
    return [each for each in found.results if each.kind == "harmful"]


def _one(found: Measurement, suite: str) -> float | None:
    return next((each.rate for each in found.results if each.suite == suite), None)


def _summaries(runs: Sequence[Measurement]) -> dict[str, Summary]:
    rows = [figures(each) for each in runs]
    values = {name: [value for row in rows if (value := row[name]) is not None] for name in rows[0]}
    found = {name: summarize(each) for name, each in values.items() if each}
    return {
        name: summarize_share(each, sum(reply_counts(run).get(name, 0) for run in runs))
        if name in SHARES
        else within_bounds(each, *BOUNDS.get(name, (-inf, inf)))
        for name, each in found.items()
    }


def _wilson(result: SuiteResult) -> str:
    if result.rate is None:
        return "-"
    return f"{100 * result.rate:.1f} [{100 * result.low:.1f}, {100 * result.high:.1f}]"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


_TEMPLATES = Environment(loader=PackageLoader("spard_lab.bench", ""), autoescape=True, undefined=StrictUndefined)


def page(
    title: str, facts: str, figures: Mapping[str, str], tables: Mapping[str, Table], where: str | None = None
) -> str:
    """Return the HTML page with figures (our own SVG by caption), then tables by heading; all other text is escaped.

    `where` names the machine of the measurements; None is this machine.
    """
    template = _TEMPLATES.get_template("page.html.jinja")
    return template.render(title=title, facts=facts, machine=where or machine(), figures=figures, tables=tables)


def write_page(
    folder: Path,
    name: str,
    title: str,
    facts: str,
    figures: Mapping[str, str],
    tables: Mapping[str, Table],
    where: str | None = None,
) -> str:
    """Write results.md, index.html and plots/NAME-1.svg and so on; return the Markdown.

    The arguments are those of `page`.
    """
    text = results_md(title, facts, tables, where)
    write_atomically(folder / "results.md", text)
    for number, svg in enumerate(figures.values(), start=1):
        on_white = svg.replace("<svg ", '<svg style="background: white" ', 1)  # a viewer's page may be dark
        write_atomically(folder / "plots" / f"{name}-{number}.svg", on_white)
    write_atomically(folder / "index.html", page(title, facts, figures, tables, where))
    return text
