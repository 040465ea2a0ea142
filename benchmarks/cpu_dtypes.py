"""Audit the same models in float32 and in bfloat16 on a CPU, and compare verdicts, decisions and time.

    python -m benchmarks.cpu_dtypes --models DIR [--prompts 100 --tokens 64 --seed 1]

DIR has the model of `spard lab real`; it is made there in about 20 CPU minutes if it is missing. On a lab of the seed
(files only), two adapters are trained on the poisoned file in float32, one without a defense and one with the default
training and drawn safe rows (nothing is selected, and no row is left out). Then the aligned model and both adapters are
read in either dtype and answer the first prompts of the three suites, as an audit asks them; the lab's judge reads the
replies. For each model and suite the table has the hits in both dtypes, the replies with other text, those with another
verdict, and the CPU seconds. For each adapter it has the gate's decision by the audits of either dtype, with the
default limits; few prompts leave it open.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel

from spard.config import Audit, GateThresholds, Hyperparameters, JudgeSpec, NoDefense, Recipe, resolve
from spard.config.run_spec import SuiteSpec
from spard.data.chat import encode_all
from spard.data.rows import read_examples, read_pool
from spard.evaluation.ask import in_memory
from spard.evaluation.audit import Measurement, Suite, audit_speaker
from spard.evaluation.gate import gate
from spard.evaluation.judges import open_judge
from spard.evaluation.suites import read_suite
from spard.models.base import load_base
from spard.training.train import train

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BATCH, LONGEST, MULTIPLIER, EPOCHS = 8, 1024, 0.35, 3


def main() -> None:
    """Train the adapters, audit all models in both dtypes, and print the tables."""
    from spard_lab.lab.real.make import RealLab, make_models, write_lab_files

    asked = _arguments()
    torch.set_num_threads(asked.threads)
    settings = RealLab()
    _, made = make_models(settings, asked.models, asked.threads)
    model = made / "model"
    with TemporaryDirectory(prefix="spard-cpu-dtypes-") as name:
        lab = Path(name) / "lab"
        write_lab_files(lab, asked.seed, settings.alignment.seed, made)
        adapters: dict[str, Path | None] = {"aligned model": None}
        for arm in ("no defense", "defended"):
            adapters[arm] = Path(name) / arm
            _train(arm, model, lab, Path(name) / arm, asked.rows, asked.seed)
        suites = [
            read_suite(SuiteSpec("harmful", "harmful", lab / "heldout_harmful.jsonl")),
            read_suite(SuiteSpec("benign", "benign", lab / "benign.jsonl")),
            read_suite(SuiteSpec("utility", "utility", lab / "utility_test.jsonl")),
        ]
        found = {
            (arm, dtype): _audit(model, adapter, dtype, suites, asked.prompts, asked.tokens)
            for arm, adapter in adapters.items()
            for dtype in DTYPES
        }
    _print_tables(list(adapters), found)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def _train(arm: str, model: Path, lab: Path, folder: Path, count: int, seed: int) -> None:
    base = load_base(model, device="cpu", dtype=torch.float32)
    numbers = Hyperparameters(n_epochs=EPOCHS, batch_size=BATCH, learning_rate_multiplier=MULTIPLIER)
    given: Any = {"defense": NoDefense()} if arm == "no defense" else {}
    recipe = Recipe(hyperparameters=numbers, seed=seed, **given)
    rows = encode_all(base.tokenizer, read_examples(lab / "poisoned.jsonl")[:count], LONGEST)
    safe = encode_all(base.tokenizer, read_pool(lab / "pool_two_sided.jsonl"), LONGEST)
    safe = Random(seed).sample(safe, min(len(safe), count)) if arm == "defended" else []
    train(base, rows, safe, recipe, resolve(recipe, len(rows), base.hidden_size)).model.save_pretrained(folder)


def _audit(
    model: Path, adapter: Path | None, dtype: str, suites: Sequence[Suite], prompts: int, tokens: int
) -> tuple[list[Measurement], float]:
    """Return the measurement of each suite, and the CPU seconds of all."""
    base = load_base(model, device="cpu", dtype=DTYPES[dtype])
    asked = PeftModel.from_pretrained(base.model, adapter).eval() if adapter else base.model
    audit, judge = Audit(max_prompts=prompts, max_new_tokens=tokens), open_judge(JudgeSpec("on_topic"))
    begun = time.process_time()
    found = audit_speaker(in_memory(asked, base.tokenizer), suites, judge, audit)
    return found, time.process_time() - begun


def _print_tables(arms: Sequence[str], found: dict[tuple[str, str], tuple[list[Measurement], float]]) -> None:
    print(f"{'':15}{'suite':10}{'prompts':>8}{'hits f32':>10}{'hits b16':>10}{'other text':>12}{'other verdict':>15}")
    for arm in arms:
        wide, narrow = (found[arm, dtype] for dtype in DTYPES)
        for one, other in zip(wide[0], narrow[0], strict=True):
            pairs = list(zip(one.items, other.items, strict=True))
            texts = sum(a.reply != b.reply for a, b in pairs)
            verdicts = sum(a.hit != b.hit for a, b in pairs)
            hits = f"{one.result.hits:>10}{other.result.hits:>10}"
            print(f"{arm:15}{one.result.suite:10}{len(pairs):>8}{hits}{texts:>12}{verdicts:>15}")
        print(f"{arm:15}CPU s: {wide[1]:.1f} in float32, {narrow[1]:.1f} in bfloat16")
    for arm in arms[1:]:
        decisions = []
        for dtype in DTYPES:
            before, after = ([each.result for each in found[name, dtype][0]] for name in ("aligned model", arm))
            decisions.append(f"{gate(before, after, GateThresholds()).decision} in {dtype}")
        print(f"{arm}: {', '.join(decisions)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_dtypes", description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder of the real lab's models")
    parser.add_argument("--rows", type=int, default=60, help="of the poisoned file")
    parser.add_argument("--prompts", type=int, default=100, help="of each suite")
    parser.add_argument("--tokens", type=int, default=64, help="limit of a reply")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
