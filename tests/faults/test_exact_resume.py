"""F1, F19: a run that is killed at random, and whose checkpoints are damaged, ends in the very same adapter."""

from __future__ import annotations

import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import pytest

from spard.config import Defense, Lisa, NoDefense, SafeGrad, Spard
from tests.faults import trainer
from tests.faults.conftest import Record
from tests.faults.processes import context
from tests.faults.storm import is_soak

KILLS = {"spard": 5, "none": 3}  # in the slice; 200 of each in the soak
MAX_KILLS, MAX_ATTEMPTS, WAIT_S = 5, 40, 600.0
DEFENSES: dict[str, Defense] = {  # each that keeps something between steps, and plain fine-tuning
    "spard": Spard(tau=4.0, safe_batch_size=3),
    "gated": Spard(variant="gated", tau=4.0, safe_batch_size=3),
    "preconditioned": Spard(variant="preconditioned", tau=4.0, safe_batch_size=3),
    "lisa": Lisa(),
    "safegrad": SafeGrad(),
    "none": NoDefense(),
}


@pytest.mark.parametrize("defense", DEFENSES)
def test_killed_runs_end_in_the_same_adapter(
    defense: str, model: Path, tmp_path: Path, seed: int, record_property: Record
) -> None:
    wanted, begun = _run(model, DEFENSES[defense], tmp_path / "whole", Random(seed), kills=0)
    rng, left, resumed, damaged = Random(seed), (200 if is_soak() else KILLS.get(defense, 1)), 0, 0
    kills = 0
    while kills < left:
        folder, planned = tmp_path / f"run-{kills}", rng.randint(1, MAX_KILLS if is_soak() else 2)
        digests, begins = _run(model, DEFENSES[defense], folder, rng, planned)
        assert digests == wanted
        kills += planned
        resumed += sum(step > 1 for step in begins)
        damaged += len(list(folder.glob("damaged-*")))
    record_property("kills", kills)
    record_property("attempts that went on from a checkpoint", resumed)
    record_property("damaged checkpoints", damaged)
    assert begun == [1]
    assert resumed >= kills // 4, "vacuous: hardly anything was resumed"


def test_randomness_that_is_not_restored_is_found_out(model: Path, tmp_path: Path, seed: int) -> None:
    wanted, _ = _run(model, DEFENSES["spard"], tmp_path / "whole", Random(seed), kills=0, is_mutant=True)
    digests, begins = wanted, [1]
    while begins[-1] == 1:
        digests, begins = _run(model, DEFENSES["spard"], _new(tmp_path), Random(seed), kills=1, is_mutant=True)
        seed += 1
    assert digests != wanted


def _new(folder: Path) -> Path:
    return folder / f"run-{len(list(folder.iterdir()))}"


def _run(
    model: Path, defense: Defense, folder: Path, rng: Random, kills: int, is_mutant: bool = False
) -> tuple[set[str], list[int]]:
    """The digests that a run ends in, and at which step each of its attempts began; each kill may come with damage.

    A run that ended before all of its kills begins again: from its last checkpoint there is nothing left to hurt.
    """
    folder.mkdir()
    out, begins, left, digests = folder / "digest", list[int](), kills, set[str]()
    for _ in range(MAX_ATTEMPTS):
        process = context().Process(target=trainer.train, args=(model, defense, folder / "checkpoints", out, is_mutant))
        process.start()
        if left and _kill(process, folder, rng):
            left -= 1
            if rng.random() < 0.3:
                _damage(folder, rng)
        process.join(WAIT_S)
        begun = out.with_suffix(".first")
        begins += [int(begun.read_text() or 1)] if begun.exists() else []
        begun.unlink(missing_ok=True)
        if out.exists():
            digests.add(out.read_text())
            if not left:
                return digests, begins
            out.unlink()
            shutil.rmtree(folder / "checkpoints")
    raise AssertionError(f"no end after {MAX_ATTEMPTS} attempts")


def _kill(process: BaseProcess, folder: Path, rng: Random) -> bool:
    """SIGKILL at a random moment after the first new checkpoint; whether the process was still at work."""
    known, deadline = _newest(folder), time.monotonic() + WAIT_S
    while process.is_alive() and _newest(folder) == known and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.05))
    was_alive = process.is_alive()
    process.kill()
    process.join()
    return was_alive


def _newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoints/step-*")), default="")


def _damage(folder: Path, rng: Random) -> None:
    """Cut or flip a byte of the newest checkpoint."""
    path = folder / "checkpoints" / _newest(folder) / rng.choice(("state.safetensors", "state.json", "manifest.json"))
    if not path.exists() or path.stat().st_size == 0:
        return
    content, at = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size)
    content[at] ^= 1
    path.write_bytes(content if rng.random() < 0.5 else content[:at])
    (folder / f"damaged-{path.parent.name}-{path.name}").touch()
