"""Metric sink for MLflow; its own variable MLFLOW_TRACKING_URI names the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from worker.sinks.base import RunFacts, Sink, Status

_JOB = "spard.job_id"
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class _MLflow:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id, self._step = client, run_id, 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, now = step, int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()]
        )

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        self.step(self._step, figures)
        self._client.set_tag(self._run_id, "spard.gate", gate)

    def close(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])


def open_sink(facts: RunFacts) -> Sink:
    """Create a run, or continue the run that is tagged with the job's id."""
    client = MlflowClient()
    found = client.get_experiment_by_name(facts.project)
    experiment = found.experiment_id if found else client.create_experiment(facts.project)
    earlier = client.search_runs([experiment], filter_string=f"tags.`{_JOB}` = '{facts.id}'", max_results=1)
    if earlier:
        client.update_run(earlier[0].info.run_id, status="RUNNING")
        return _MLflow(client, earlier[0].info.run_id)
    tags = {_JOB: facts.id} | {f"tag.{each}": "true" for each in facts.tags}
    run_id = client.create_run(experiment, tags=tags, run_name=facts.name).info.run_id
    client.log_batch(run_id, params=[Param(name, str(value)) for name, value in facts.params.items()])
    return _MLflow(client, run_id)
