"""The environment of child processes that handle customers' data, and the paths of secrets that they cannot read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sqlalchemy import make_url

from app.ops.processes import safe_path
from app.settings import Settings

_NAMES = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ"})
_PREFIXES = ("CUBLAS_", "CUDA_", "HF_", "LC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH", "VLLM_")
_SECRET = ("CREDENTIAL", "KEY", "PASSWORD", "SECRET", "TOKEN")  # a name with one of these is not passed
_FIXED = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads are five times slower on cores that other processes use
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # meant for developers, not for our log
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(settings: Settings, device: str | None = None) -> dict[str, str]:
    """Return a child's environment variables: paths, model folders, threads and device, without any secret.

    `device` is as in `SPARD_DEVICE`, whose value is the default.
    """
    device = device or settings.device
    passed = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    passed = {name: value for name, value in passed.items() if not any(word in name for word in _SECRET)}
    passed |= _FIXED | {"OMP_NUM_THREADS": str(settings.worker_threads or max(1, (os.cpu_count() or 1) - 1))}
    if settings.worker_threads:
        passed["SPARD_WORKER_THREADS"] = str(settings.worker_threads)  # asked for: for small models too
    if device == "cpu":
        passed["CUDA_VISIBLE_DEVICES"] = ""
    passed |= {"SPARD_DEVICE": device, "SPARD_CPU_DTYPE": settings.cpu_dtype}
    return safe_path(passed)


def secret_places(settings: Settings) -> Iterator[Path]:
    """Yield the paths of keys, database and customers' data, which no child may read."""
    yield settings.data_dir.resolve()
    if settings.signing_key:
        yield settings.signing_key.resolve()
    if (storage := urlsplit(settings.storage())).scheme == "file":
        yield Path(unquote(storage.path)).resolve()
    if settings.is_embedded() and (database := make_url(settings.database()).database):
        yield Path(database).resolve()
