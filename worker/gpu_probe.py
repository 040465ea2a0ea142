"""python -m worker.gpu_probe: exit with 0 if a new process can compute on the GPUs of a job."""

from __future__ import annotations

import os

import torch

_SIZE = 256


def main() -> None:
    """Multiply two matrices on each GPU; exit with an error if a sum is wrong."""
    for ordinal in range(int(os.environ.get("SPARD_GPUS_PER_JOB", "1"))):
        ones = torch.ones(_SIZE, _SIZE, device=f"cuda:{ordinal}")
        found = float((ones @ ones).sum())
        if found != _SIZE**3:
            raise SystemExit(f"GPU {ordinal} says {found}")


if __name__ == "__main__":
    main()
