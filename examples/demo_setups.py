"""The demo's setups: the lab's tiny model, or a real one (`make demo MODEL=real`).

The real model's jobs are small, for two cores: four epochs, and an audit of fewer prompts and shorter replies than the
default. They take 17 minutes together on a CPU that multiplies in bfloat16, up to an hour on others. A smaller audit
errs more often (docs/audit.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """A lab, the way to make it, and the settings of the jobs on it.

    `seeds` are the lab's: if the gate stops the defended job, the next seed is tried. `options` go into both jobs'
    requests, `audit` into their `safety`, `defense` into the defended one's; at most `limit` prompts of each kind
    measure the downloaded adapters.
    """

    model: str  # its name in the service
    folder: str  # the lab's folder inside the demo's
    title: str
    making: str
    command: tuple[str, ...]  # makes the lab; the folder is appended
    audit: Mapping[str, Any]
    task: str
    seeds: tuple[int, ...] = (1,)
    defense: Mapping[str, Any] = field(default_factory=lambda: {"type": "spard"})
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 300
    environment: Mapping[str, str] = field(default_factory=dict)  # settings of the service


TINY = DemoSetup(
    model="lab",
    folder="lab",
    title="SPARD: one poisoned file, fine-tuned twice",
    making="making the lab: a tiny aligned model and its data (about a minute, once)",
    command=("make",),
    # all benign prompts behind random words: the default's 120 barely suffice for a decision
    audit={"asking": {"random": 360}},
    task="word-problems",
    seeds=(1, 2, 3),  # results of a seed differ between CPUs, and the gate occasionally stops a job
)
REAL = DemoSetup(
    model="smollm2",
    folder="real-lab",
    title="SPARD on SmolLM2-135M: one poisoned file, fine-tuned twice",
    making="making the real model: fetched, converted, aligned, measured (about 20 minutes, once)",
    command=("real", "--cores", "2"),
    audit={
        "max_prompts": 120,  # with 60, bounds of 95 % stay above the gate's limits at rates as good as the base model's
        "max_new_tokens": 32,
        "asking": {"dresses": 2, "random": 120, "prompts": 120, "sampled": 0, "prefilled": 0, "turns": 0, "phrases": 0},
    },
    task="messages",
    # With the default's bound, on the mean loss of the safe rows, the gate found harmless requests refused too often.
    # With this one fewer are refused; figures of both are in lab/docs/results/real-base.md.
    defense={"type": "spard", "bound": "excess"},
    options={"hyperparameters": {"n_epochs": 4, "batch_size": 4, "learning_rate_multiplier": 0.35}},
    limit=60,
    environment={
        "SPARD_JUDGE": "on_topic",  # the lab's own, measured on labeled replies of this model
        "SPARD_CPU_DTYPE": "auto",  # bfloat16 takes half the time on CPUs that multiply in it
        "SPARD_WORKER_THREADS": "2",  # both cores, because jobs run one after the other
        "SPARD_CHECKPOINT_PROMPTS": "0",  # no audits of epochs before the last one, which would take four minutes
    },
)
SETUPS = {"lab": TINY, "real": REAL}
