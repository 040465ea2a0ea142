"""How much main memory an engine is to find before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from app.errors import TooManyRequests
from app.inference.embedded import EmbeddedEngines
from app.ops import processes
from app.settings import Settings
from app.storage import open_storage

BILLIONS_7 = 7_000_000_000


@pytest.mark.parametrize(
    ("device", "free_mb", "fits"), [("cpu", 20_000, False), ("cpu", 30_000, True), ("cuda", 20_000, True)]
)
def test_weights_for_a_gpu_take_half_of_what_they_take_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "cuda"], free_mb: int, fits: bool
) -> None:
    monkeypatch.setattr(processes, "available_mb", lambda: free_mb)
    settings = Settings(data_dir=tmp_path, serving_device=device)
    engines = EmbeddedEngines(settings, open_storage(f"file://{tmp_path}", None))
    try:
        if fits:
            engines._make_room(BILLIONS_7)
        else:
            with pytest.raises(TooManyRequests, match="no memory"):
                engines._make_room(BILLIONS_7)
    finally:
        engines.close()
