"""Compare embedders by the safe rows that they select.

Run `python -m benchmarks.embedders --pool FILE --rows FILE --base DIR --encoder DIR`. `--pool` has rows with `prompt`
and `safe`; `--rows` is a customer's training data: rows with `prompt` or `question`, or conversations. `--encoder` is a
sentence encoder; it is one of the arms and also judges the rows of the others. The simulated customer's file has
`--count` of the rows and `--held-out` prompts of the pool (removed from the pool), which stand for the harmful requests
in a poisoned file. `--seed` determines every random choice.

Each arm selects k rows of the pool as a job does (`spard.selection.select.choose`). The table shows for each:

- the relevance of the selected prompts: the mean cosine to the nearest row of the customer's file, according to the
  encoder, to TF-IDF of words, and to the base model's hidden states as the default embeds them; and the same as a
  multiple of random rows (`--draws` random selections). A value in parentheses is an arm's measure of itself;
- the share of selected rows that nearly equal an earlier one, by the encoder (cosine of 0.9 or more) and by words
  (`spard.data.overlap`);
- the share of the pool's groups that the selected rows cover: the rows' `category` where they have one, else 64
  clusters of the encoder's vectors;
- the rank correlation of the arm's relevance over the whole pool with that of the encoder and of TF-IDF;
- the mean cosine of two pool rows (`cone`), and the share of pool rows whose nearest row is a held-out request;
- CPU seconds for embedding, for fitting the frame, and for selecting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.config import Selection
from spard.data.overlap import clusters
from spard.models.base import load_base
from spard.selection.embeddings import embed, encode, load_encoder
from spard.selection.relevance import DIRECTIONS, fit_frame, in_frame, mean_cosine, relevance
from spard.selection.select import choose
from spard.selection.shards import whole

HEAD = (
    "| rows chosen by | encoder | TF-IDF | base states | x random | duplicates | by words | groups "
    "| rank correlation | cone | held-out nearest | CPU s: vectors, frame, choice | rank |"
)
COUNTS = (1, 2, 3, 5, 8, 12, 16)  # numbers of principal directions to remove from the centered states
DUPLICATE = 0.9  # encoder cosine from which two prompts count as near duplicates
GROUPS = 64
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The pool's prompts with their categories, and the customer's requests; the last `held_out` come from the pool."""

    pool: list[str]
    categories: list[str]
    task: list[str]
    held_out: int


@dataclass(slots=True)
class Arm:
    """One embedder: its vectors of the pool `[N, D]` and the task `[M, D]`, and the CPU seconds by step."""

    pool_ND: Tensor
    task_MD: Tensor
    seconds: dict[str, float] = field(default_factory=dict)
    judges: frozenset[str] = frozenset()  # judges with the arm's own vectors, which are not neutral


def main() -> None:
    """Embed with every arm, select rows, and print the table."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    inputs = _inputs(asked)
    arms = _arms(asked, inputs)
    judges = _judges(inputs, arms)
    groups = inputs.categories if all(inputs.categories) else _groups(judges["encoder"][0], asked.seed)
    print(
        f"{len(inputs.pool)} pool rows, {len(inputs.task) - inputs.held_out} rows and {inputs.held_out} held-out ",
        end="",
    )
    print(f"requests, k = {asked.k}, beta = {asked.beta:g}, seed {asked.seed}, {len(set(groups))} groups; ", end="")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {asked.threads} thread(s)")
    for line in (HEAD, "|---|" + "--:|" * 12):
        print(line)
    drawn = [_random_rows(len(inputs.pool), asked.k, asked.seed + draw) for draw in range(asked.draws)]
    found = [_measure_choice(rows, judges, groups, inputs) for rows in drawn]
    means = {name: statistics.mean(each[name] for each in found) for name in found[0]}
    spread = {name: statistics.stdev(each[name] for each in found) for name in judges}
    relevances = " | ".join(f"{means[name]:.3f} +- {spread[name]:.3f}" for name in judges)
    shares = f"{means['alike']:.1%} | {means['alike_words']:.1%} | {means['groups']:.0%}"
    print(f"| random, {asked.draws} draws | {relevances} | 1 | {shares} | | | | | |")
    for name, arm in arms.items():
        _print_arm(name, arm, asked, judges, groups, inputs, means)


def _print_arm(
    name: str,
    arm: Arm,
    asked: argparse.Namespace,
    judges: Mapping[str, tuple[Tensor, Tensor]],
    groups: Sequence[Any],
    inputs: Inputs,
    means: Mapping[str, float],
) -> None:
    quality_N, nearest_N = relevance(arm.pool_ND, arm.task_MD)
    begun = time.process_time()
    chosen = choose(
        arm.pool_ND, arm.task_MD, asked.k, Selection(beta=asked.beta), asked.seed, None, (quality_N, nearest_N)
    )
    arm.seconds["choice"] = time.process_time() - begun
    found = _measure_choice(chosen.indices, judges, groups, inputs)
    marks = {judge: f"({found[judge]:.3f})" if judge in arm.judges else f"{found[judge]:.3f}" for judge in judges}
    ratios = [f"{found[judge] / means[judge]:.2f}" for judge in judges if judge not in arm.judges]
    correlations = [
        f"{_rank_correlation(quality_N, relevance(*judges[judge])[0]):.2f}" for judge in ("encoder", "tf-idf")
    ]
    held_out = float((nearest_N >= len(inputs.task) - inputs.held_out).double().mean())
    seconds = ", ".join(f"{arm.seconds.get(part, 0):.1f}" for part in ("vectors", "frame", "choice"))
    print(f"| {name} |" + "|".join(f" {marks[judge]} " for judge in judges) + f"| {', '.join(ratios)} ", end="")
    print(
        f"| {found['alike']:.1%} | {found['alike_words']:.1%} | {found['groups']:.0%} | {', '.join(correlations)} ",
        end="",
    )
    print(f"| {mean_cosine(arm.pool_ND):.3f} | {held_out:.2f} | {seconds} | {chosen.rank} |", flush=True)


def _measure_choice(
    rows: Sequence[int], judges: Mapping[str, tuple[Tensor, Tensor]], groups: Sequence[Any], inputs: Inputs
) -> dict[str, float]:
    """Return the figures of selected rows by name.

    They are the mean relevance by each judge, the shares of near duplicates (`alike`, `alike_words`), and the share of
    groups covered (`groups`).
    """
    found = {}
    for name, (pool_ND, task_MD) in judges.items():
        found[name] = float(relevance(pool_ND[list(rows)], task_MD)[0].mean())
    unit_KD = normalize(judges["encoder"][0][list(rows)].double(), dim=1)
    alike = torch.tril(unit_KD @ unit_KD.T, diagonal=-1).amax(dim=1) >= DUPLICATE
    labels = clusters([inputs.pool[i] for i in rows])
    found["alike"] = float(alike.double().mean())
    found["alike_words"] = 1 - len(set(labels)) / len(labels)
    found["groups"] = len({groups[i] for i in rows}) / len(set(groups))
    return found


def _arms(asked: argparse.Namespace, inputs: Inputs) -> dict[str, Arm]:
    """Embed with every arm; all arms of the base model's states share one computation of the vectors."""
    base = load_base(str(asked.base), device="cpu")
    raw = _choose_by_vectors(partial(embed, base), inputs)
    arms = {"states, raw": raw}
    for count in (0, *COUNTS):
        begun = time.process_time()
        frame = fit_frame(raw.pool_ND, count, asked.seed)
        pool_ND, task_MD = whole(in_frame(raw.pool_ND, frame)), whole(in_frame(raw.task_MD, frame))
        seconds = {**raw.seconds, "frame": time.process_time() - begun}
        name = f"states, centered, {count} directions out" if count else "states, centered"
        arms[name] = Arm(pool_ND, task_MD, seconds, frozenset({"base"}))
    encoder = load_encoder(asked.encoder, device="cpu")
    own = _choose_by_vectors(partial(encode, encoder), inputs)
    own.judges = frozenset({"encoder"})
    arms[f"encoder {asked.encoder_name or encoder.name}"] = own
    frame = fit_frame(own.pool_ND, 0, asked.seed)
    arms["encoder, centered"] = Arm(frame.project(own.pool_ND), frame.project(own.task_MD), own.seconds, own.judges)
    raw.judges = frozenset({"base"})
    return arms


def _choose_by_vectors(embedded: Callable[[list[str]], Tensor], inputs: Inputs) -> Arm:
    begun = time.process_time()
    both = embedded([*inputs.pool, *inputs.task])
    seconds = time.process_time() - begun
    return Arm(both[: len(inputs.pool)], both[len(inputs.pool) :], {"vectors": seconds})


def _judges(inputs: Inputs, arms: Mapping[str, Arm]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each judge's vectors of pool and task.

    The base model's states are neutral only for the rows that the encoder selected.
    """
    encoder = next(arm for name, arm in arms.items() if name.startswith("encoder "))
    states = arms[f"states, centered, {DIRECTIONS} directions out"]
    return {
        "encoder": (encoder.pool_ND, encoder.task_MD),
        "tf-idf": _tf_idf(inputs),
        "base": (states.pool_ND, states.task_MD),
    }


def _tf_idf(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return TF-IDF vectors of pool and task: (1 + log count) * log(texts / texts with the word).

    Words that occur in one text only are left out.
    """
    texts = [Counter(_WORD.findall(text.lower())) for text in (*inputs.pool, *inputs.task)]
    spread = Counter(word for counts in texts for word in counts)
    column = {word: i for i, word in enumerate(sorted(word for word, count in spread.items() if count > 1))}
    x_ND = torch.zeros(len(texts), len(column))
    for row, counts in enumerate(texts):
        for word, count in counts.items():
            if word in column:
                x_ND[row, column[word]] = (1 + math.log(count)) * math.log(len(texts) / spread[word])
    return x_ND[: len(inputs.pool)], x_ND[len(inputs.pool) :]


def _groups(x_ND: Tensor, seed: int) -> list[int]:
    """Return the cluster of each row by spherical k-means: 20 iterations from random rows as centers."""
    unit_ND = normalize(x_ND.double(), dim=1)
    center_GD = unit_ND[_random_rows(len(unit_ND), min(GROUPS, len(unit_ND)), seed)]
    for _ in range(20):
        nearest_N = (unit_ND @ center_GD.T).argmax(dim=1)
        center_GD = normalize(torch.zeros_like(center_GD).index_add(0, nearest_N, unit_ND), dim=1)
    groups: list[int] = nearest_N.tolist()
    return groups


def _rank_correlation(a_N: Tensor, b_N: Tensor) -> float:
    """Return Spearman's rank correlation of two vectors."""
    ranks = torch.stack([each.argsort().argsort().double() for each in (a_N, b_N)])
    return float(torch.corrcoef(ranks)[0, 1])


def _random_rows(count: int, k: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), k)


def _inputs(asked: argparse.Namespace) -> Inputs:
    pool, rows = (
        [json.loads(line) for line in path.read_text().split("\n") if line] for path in (asked.pool, asked.rows)
    )
    pool = [row for row in pool if not row.get("benign")]
    chooser = random.Random(asked.seed)
    drawn = chooser.sample(pool, min(len(pool), asked.pool_rows + asked.held_out))
    held_out, kept = drawn[: asked.held_out], drawn[asked.held_out :]
    task = [_text(row) for row in chooser.sample(rows, min(len(rows), asked.count))]
    return Inputs(
        [_text(row) for row in kept],
        [str(row.get("category") or "") for row in kept],
        [*task, *(_text(row) for row in held_out)],
        len(held_out),
    )


def _text(row: Mapping[str, Any]) -> str:
    if "messages" in row:
        return "\n".join(str(turn["content"]) for turn in row["messages"] if turn["role"] == "user")
    return str(row.get("prompt") or row["question"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--pool", "--rows", "--base", "--encoder"):
        parser.add_argument(name, type=Path, required=True)
    for name, default in (("--pool-rows", 3000), ("--count", 300), ("--held-out", 30), ("--k", 225)):
        parser.add_argument(name, type=int, default=default)
    for name, default in (("--draws", 20), ("--seed", 0), ("--threads", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--beta", type=float, default=Selection().beta)
    parser.add_argument("--encoder-name", help="what the table calls it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
