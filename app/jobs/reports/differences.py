"""List the differences between compared jobs: settings, file and outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from app.jobs.reports.held_back import is_held_back, stopping_figure
from app.jobs.schemas import JobOut


def differences(jobs: Sequence[JobOut]) -> dict[str, list[str]]:
    """Return the settings that differ between the jobs: for each name, one text per job in their order."""
    facts = [dict(_facts(job)) for job in jobs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = {name: [each.get(name, "-") for each in facts] for name in names}
    return {name: texts for name, texts in rows.items() if len(set(texts)) > 1}


def _facts(job: JobOut) -> Iterator[tuple[str, str]]:
    yield "File", job.filename or job.training_file
    yield "Base model", job.model
    for name, number in job.hyperparameters.items():
        yield name.removeprefix("n_").replace("_", " ").capitalize(), str(number)
    yield "Seed", str(job.seed)
    yield from _settings("Defense", job.safety["defense"].items())
    yield from _settings("Selection", job.safety["selection"].items())
    yield from _settings("LoRA", (job.lora or {}).items())
    yield "Status", "held back" if is_held_back(job) else str(job.status)
    yield "What stopped it", stopping_figure(job.safety.get("gate")) or "-"
    yield "Tokens trained", "-" if job.trained_tokens is None else f"{job.trained_tokens:,}"


def _settings(group: str, values: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    for name, value in values:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield f"{group} {name}".replace("_", " "), text
