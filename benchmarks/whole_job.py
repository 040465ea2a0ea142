"""Compare a whole job on the real model, audits included, with plain fine-tuning by TRL: CPU time and peak memory.

    python -m benchmarks.whole_job --models DIR [--arms plain small full] [--rows 300 --epochs 3 --rounds 1]

DIR has the model of `spard lab real`; it is made there in about 20 CPU minutes if it is missing. The arms:

- plain: TRL's SFTTrainer with a LoRA adapter of the same rank and modules, and its other defaults, in float32;
- plain bf16: the same with its option `bf16`;
- small: a defended job with the small audit of a policy (`spard.config.AUDITS`);
- full: a defended job with the default audit.

With `SPARD_CPU_DTYPE=bfloat16` the jobs compute in bfloat16. All train the same rows of an honest customer (two seeds
of the lab) for the same epochs in the same batches, each in a process of its own. CPU seconds are those of the process
and its children, from start to end. Memory is the largest sum of the resident memory of these processes, looked at
every fifth of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import psutil

from benchmarks.training import LONGEST, LORA

ARMS = ("plain", "plain bf16", "small", "full")
BATCH, SEED, LOOK_S = 8, 1, 0.2
MULTIPLIER = 0.35  # of the learning rate, as in the demo on this model


def main() -> None:
    """Run the arms in alternating rounds and print a line for each."""
    asked = _arguments()
    if asked.arm:
        _train(asked.arm, asked.models, asked.folder, asked.epochs, asked.threads)
        return
    print(f"{asked.rows} rows, {asked.epochs} epochs, batches of {BATCH}, {asked.threads} thread(s)")
    with TemporaryDirectory(prefix="spard-whole-job-") as name:
        folder = Path(name)
        _write_files(folder, asked.models, asked.rows, asked.threads)
        for number in range(1, asked.rounds + 1):
            first: tuple[float, float] | None = None
            for arm in asked.arms:
                command = [sys.executable, "-m", "benchmarks.whole_job", "--arm", arm, "--models", str(asked.models)]
                command += ["--folder", name, "--epochs", str(asked.epochs), "--threads", str(asked.threads)]
                cpu_s, bytes_, words = _run(command, asked.threads)
                first = first or (cpu_s, bytes_)
                ratios = f"{cpu_s / first[0]:.2f} and {bytes_ / first[1]:.2f} of {asked.arms[0]}"
                print(
                    f"round {number}, {arm}: {cpu_s:.0f} CPU s, {bytes_ / 2**30:.2f} GiB; {ratios}; {words}", flush=True
                )
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def _run(command: Sequence[str], threads: int) -> tuple[float, float, str]:
    """Return CPU seconds, peak bytes of resident memory, and the last line that the command prints."""
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            held = 0
            with suppress(psutil.NoSuchProcess):
                for each in (watched, *watched.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        held += each.memory_info().rss
            peak = max(peak, held)
            time.sleep(LOOK_S)
        lines = process.stdout.read().splitlines() if process.stdout else []
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, peak, lines[-1]


def _write_files(folder: Path, models: Path, count: int, cores: int) -> None:
    from spard_lab.lab.real.make import RealLab, lab_files, make_models, write_lab_files

    settings = RealLab()
    _, model = make_models(settings, models, cores)
    write_lab_files(folder / "lab", SEED, settings.alignment.seed, model)
    rows = [row for seed in (SEED, SEED + 1) for row in lab_files(seed, settings.alignment.seed)["train.jsonl"]]
    if len(rows) < count:
        raise SystemExit(f"two seeds of the lab have {len(rows)} rows; --rows may be at most that")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")


def _train(arm: str, models: Path, folder: Path, epochs: int, threads: int) -> None:
    import torch
    from spard_lab.lab.real.make import RealLab, make_models

    torch.set_num_threads(threads)
    _, made = make_models(RealLab(), models, threads)
    if arm.startswith("plain"):
        print(_plain(made / "model", folder, epochs, is_narrow=arm == "plain bf16"))
    else:
        print(_job(arm, made / "model", folder, epochs))


def _job(arm: str, model: Path, folder: Path, epochs: int) -> str:
    from spard.config import AUDITS, AuditSize, Hyperparameters, JudgeSpec, Recipe, RowSignal
    from spard.config.run_spec import RunSpec, SuiteSpec
    from spard.pipeline import run

    lab = folder / "lab"
    suites = (
        SuiteSpec("harmful", "harmful", lab / "heldout_harmful.jsonl"),
        SuiteSpec("benign", "benign", lab / "benign.jsonl"),
        SuiteSpec("utility", "utility", lab / "utility_test.jsonl"),
    )
    numbers = Hyperparameters(n_epochs=epochs, batch_size=BATCH, learning_rate_multiplier=MULTIPLIER)
    recipe = Recipe(hyperparameters=numbers, audit=AUDITS[cast(AuditSize, arm)], seed=SEED)
    files = folder / "rows.jsonl", lab / "pool_two_sided.jsonl"
    judge = JudgeSpec("on_topic")
    spec = RunSpec(str(model), *files, suites=suites, recipe=recipe, judge=judge, row_signal=RowSignal("auto"))
    with TemporaryDirectory(prefix="spard-whole-job-run-") as out:
        report = run(spec, Path(out) / "job", lambda message: None).report
    return f"{report.gate.decision}; replies {dict(report.replies)}"


def _plain(model: Path, folder: Path, epochs: int, *, is_narrow: bool) -> str:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl, datasets = import_module("trl"), import_module("datasets")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": epochs,
        "max_length": LONGEST,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": is_narrow,
        "seed": SEED,
    }
    with TemporaryDirectory(prefix="spard-whole-job-trl-") as out:
        trainer = trl.SFTTrainer(
            AutoModelForCausalLM.from_pretrained(model),
            trl.SFTConfig(out, **settings),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=LoraConfig(**LORA),
        )
        trainer.train()
        trainer.model.save_pretrained(out)
    return f"loss {trainer.state.log_history[-1].get('train_loss', float('nan')):.3f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_job", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder of the real lab's models")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
