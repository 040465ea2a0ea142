"""What the machine that runs the tests may not decide: its variables are taken out before anything reads them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_KEPT = frozenset({"SPARD_DATA", "SPARD_SOAK"})  # asked of the tests themselves, as are FAULT_SEED and TEST_...
_PREFIXES = ("ACCELERATE_", "AWS_", "CELERY_", "OPENAI_", "OTEL_", "PG", "SPARD_")
_NAMES = frozenset(
    {
        *("COLUMNS", "LINES", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR"),  # how wide and bright rich writes
        *("FORWARDED_ALLOW_IPS", "WEB_CONCURRENCY"),  # read by uvicorn
        *("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),  # read by transformers' trainer
        *("MPLBACKEND", "PYTHONWARNINGS"),
        "PYTHONDONTWRITEBYTECODE",  # else each process that a test starts compiles our sources anew
    }
)
_SET = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",  # else a client without credentials asks the network for them
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_HUB_OFFLINE": "1",
    # Our children do not look into the current folder, and some that tests start are modules of the tests.
    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
}
_LOOPBACK = "127.0.0.1,localhost"


def settle(environment: MutableMapping[str, str]) -> None:
    """Leave what programs need to run, and nothing that changes what they answer.

    Proxies stay for those who install packages through one, but our own servers are reached without; GPUs are hidden
    unless CUDA_VISIBLE_DEVICES names some, since what is compared to the bit is computed on the CPU. The tests'
    models are too small for several threads, which wait for each other where two tests run; OMP_NUM_THREADS sets
    another number.
    """
    leaking = [name for name in environment if name in _NAMES or name.startswith(_PREFIXES)]
    for name in leaking:
        if name not in _KEPT:
            del environment[name]
    environment.update(_SET)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("CUDA_VISIBLE_DEVICES", "")
    for name in ("NO_PROXY", "no_proxy"):
        others = environment.get(name)
        environment[name] = f"{others},{_LOOPBACK}" if others else _LOOPBACK
