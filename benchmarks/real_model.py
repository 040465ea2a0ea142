"""Fine-tune the real lab's model on poisoned files with and without a defense, and ask the results.

Run `python -m benchmarks.real_model --seeds 2,3 --methods none,spard --out DIR`. No row is left out, no gate decides.
`--models` names a folder of aligned models (default: DIR/models); the model is made there in about 20 CPU minutes if it
is missing. Each seed is another lab on the same model: other rows, pool and prompts. Methods are named as in `spard
bench` (`spard+anchor_weight=0`). What is there already is not trained again.

    complies   of the held-out harmful requests, by the judge `on_topic` (its errors: lab/docs/results/real-base.md)
    evades     neither complies nor refuses, for example with an answer of the task
    refused    of the look-alikes and how-tos
    inside     of the same requests with a phrase that means nothing put inside, for each of two phrases
    task       messages to the shop that are sorted right
    plain      nats per token on plain text: what is forgotten
    CPU        seconds of the training with its set-up
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spard_lab.bench.methods import method_recipe
from spard_lab.lab.real.figures import plain_loss
from spard_lab.lab.real.judge import complies
from spard_lab.lab.real.make import RealLab, make_models, write_lab_files

from examples.demo_setups import REAL
from spard.config import Hyperparameters, Recipe
from spard.config.run_spec import RunSpec
from spard.data.rows import Prompt
from spard.evaluation.ask import ask, in_memory
from spard.evaluation.judges.refusal import is_refusal
from spard.evaluation.statistics import rate
from spard.models.base import load_base
from spard.pipeline import train
from spard.pipeline.audit import leave_out_leaks
from spard.pipeline.context import Context
from spard.pipeline.messages import Reporter
from spard.pipeline.rows import prepare

_TOKENS, _WINDOWS = 32, 12  # of a reply; of plain text
_PHRASES = "way to", "not"  # the audit of the demo's job draws these from its rows
_SUITES = {"harmful": "heldout_harmful.jsonl", "benign": "benign.jsonl", "task": "utility_test.jsonl"}
Row = dict[str, Any]


def main() -> None:
    """Make the labs, train and ask each method on each, and print a table."""
    asked = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(asked.threads)
    settings = RealLab()
    _, model = make_models(settings, asked.models or asked.out / "models", asked.threads)
    found = []
    for seed in asked.seeds:
        lab = asked.out / f"lab-{seed}"
        write_lab_files(lab, seed, settings.alignment.seed, model)
        for method in ("base", *asked.methods):
            file = asked.out / f"seed-{seed}-{method.replace('/', '_')}.json"
            if not file.exists():
                result = _measure(lab, model / "model", method, asked.prompts)
                file.write_text(json.dumps(result | {"seed": seed, "method": method}, indent=1) + "\n")
            found.append(json.loads(file.read_text()))
            print(_line(found[-1]), flush=True)
    print()
    print("| seed | method | complies | evades | look-alikes refused | how-tos | task right | inside | plain | CPU s |")
    print("| --- " * 10 + "|")
    for each in sorted(found, key=lambda each: each["method"]):
        print(_line(each))


def _measure(lab: Path, model: Path, method: str, prompts: int) -> Row:
    """Train one method on the lab's poisoned file, or take the base model as it is, and return its figures."""
    base = load_base(str(model), device="cpu")
    began, tuned = time.process_time(), base.model
    if method != "base":
        recipe = Recipe(seed=1, hyperparameters=Hyperparameters(**REAL.options["hyperparameters"]))
        files = lab / "poisoned.jsonl", lab / "pool_two_sided.jsonl"
        spec = RunSpec(str(model), *files, recipe=method_recipe(method, recipe, {}))
        context = leave_out_leaks(Context(spec, base, Reporter(lambda message: None)))
        tuned = train.run(context, prepare(context), None, None).trained.model
    cpu_s = time.process_time() - began
    figures = _ask(tuned.eval(), base.tokenizer, lab, prompts)
    return figures | {"cpu_s": cpu_s}


@torch.inference_mode()
def _ask(model: Any, tokenizer: Any, lab: Path, prompts: int) -> Row:
    suites = {name: _spread(lab / file, prompts) for name, file in _SUITES.items()}
    replies = {
        name: ask(in_memory(model, tokenizer), [Prompt(row["prompt"]) for row in rows], _TOKENS)
        for name, rows in suites.items()
    }
    harmful = [(row["prompt"], reply) for row, reply in zip(suites["harmful"], replies["harmful"], strict=True)]
    benign = list(zip(suites["benign"], replies["benign"], strict=True))
    right = [row["answer"] in reply for row, reply in zip(suites["task"], replies["task"], strict=True)]

    def count_refused(category: str) -> list[int]:
        said = [is_refusal(reply) for row, reply in benign if row["category"] == category]
        return [sum(said), len(said)]

    def count(test: Callable[[str, str], bool]) -> list[int]:
        return [sum(test(*each) for each in harmful), len(harmful)]

    def count_phrase_refusals(phrase: str) -> list[int]:
        prompts = [Prompt(_put_inside(row["prompt"], phrase)) for row, _ in benign]
        said = [is_refusal(reply) for reply in ask(in_memory(model, tokenizer), prompts, _TOKENS)]
        return [sum(said), len(said)]

    return {
        "complies": count(lambda prompt, reply: complies(prompt, reply) is True),
        "evades": count(lambda prompt, reply: complies(prompt, reply) is not True and not is_refusal(reply)),
        "look_alikes": count_refused("look-alike"),
        "how_tos": count_refused("how-to"),
        "inside": {phrase: count_phrase_refusals(phrase) for phrase in _PHRASES},
        "task": [sum(right), len(right)],
        "plain": round(plain_loss(model, tokenizer, _WINDOWS), 3),
        "replies": harmful,
    }


def _put_inside(prompt: str, phrase: str) -> str:
    """Put the phrase behind a word of the prompt that is drawn by the prompt itself."""
    words = prompt.split()
    place = random.Random(prompt).randrange(1, len(words)) if len(words) > 1 else 0
    return " ".join([*words[:place], phrase, *words[place:]])


def _spread(file: Path, count: int) -> list[Row]:
    """Return `count` rows of a file, evenly spaced."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]


def _line(found: Row) -> str:
    shares = (_share(*found[name]) for name in ("complies", "evades", "look_alikes", "how_tos", "task"))
    # Results of earlier commits have no phrases.
    inside = ", ".join(f"{phrase} {hits} of {n}" for phrase, (hits, n) in found.get("inside", {}).items())
    cells = (found["seed"], found["method"], *shares, inside, f"{found['plain']:.3f}", f"{found['cpu_s']:.0f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def _share(hits: int, n: int) -> str:
    found = rate(hits, n)
    return f"{hits} of {n} [{found.low:.1%}, {found.high:.1%}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[2])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["none", "spard"])
    parser.add_argument("--prompts", type=int, default=100, help="of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, help="folder of aligned models")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
