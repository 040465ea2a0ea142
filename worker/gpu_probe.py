"""python -m worker.gpu_probe: whether a new process can compute on the GPU; exit code 0 says so."""

from __future__ import annotations

import torch

_SIZE = 256


def main() -> None:
    """Multiply two matrices on the GPU; exit with an error if the sum is wrong."""
    ones = torch.ones(_SIZE, _SIZE, device="cuda")
    found = float((ones @ ones).sum())
    if found != _SIZE**3:
        raise SystemExit(f"the GPU says {found}")


if __name__ == "__main__":
    main()
