"""Metric sinks: trackers in processes of their own, which receive step metrics and audits if the provider wants that.

`worker.sinks.feed` starts and feeds them; `worker.sinks.base` defines the protocol. Other packages add their own:

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
"""Functions `RunFacts -> Sink`."""
