"""Where step metrics and audits go beside our own database: trackers that a provider turns on, a process for each.

`worker.sinks.feed` starts one and feeds it; `worker.sinks.base` says what a sink is. Other packages add theirs:

    [project.entry-points."spard.sinks"]
    mine = "my_package.sink:open_sink"
"""

from __future__ import annotations

from spard.config.extensions import Registry

SINKS = Registry(
    "spard.sinks",
    "metric sink",
    {name: f"worker.sinks.to_{name}:open_sink" for name in ("mlflow", "tensorboard", "trackio", "wandb")},
)
"""`RunFacts -> Sink`."""
