"""Compare our training speed with transformers and TRL: `python -m benchmarks.training [--rows FILE --batch 16]`.

Every arm trains a LoRA adapter of rank 16 on the attention layers of the same model for one epoch in float32, each in a
new process. The arms alternate in rounds:

- ours: this project's loop without a defense;
- one piece: the same loop without splitting a batch into passes, each batch padded to its longest row;
- rows alone: the same loop, in which the tokens that all rows of a pass begin with go through the model once per row;
- script: a short loop with PEFT, written by hand, which batches rows of similar length and computes the logits of the
  learned tokens alone;
- Trainer: transformers' Trainer with PEFT and batches of rows of similar length;
- TRL: SFTTrainer with packing into 1,024 tokens, as many packs per batch as its rows fill, if `trl` is installed; it
  also learns the prompts.

The table shows the median CPU time of training (the first step's warm-up included) with its range, its ratio to ours in
the same round, and the padding as a share of the rows' own tokens. The last line is a lower bound (`floor`): the matrix
products of the rows' tokens with the layers' weights, forward and backward, at the speed measured for one such product.
Without `--model` the weights are random; without `--rows` the rows are random, with log-normal lengths, and begin with
the same system prompt of `--system` words (none by default).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

SHAPES = {  # hidden, layers, MLP, heads, key-value heads
    "5m": (256, 5, 704, 8, 4),
    "50m": (640, 8, 1760, 10, 5),
    "1b": (2048, 22, 5632, 32, 4),
}
VOCABULARY, LONGEST, PACK = 4096, 2048, 1024
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
OWN = ("ours", "one piece", "rows alone")
ARMS = (*OWN, "script", "Trainer", "TRL")


def main() -> None:
    """Run all arms in alternating rounds and print the table, or with `--arm` measure one arm in this process."""
    asked = _arguments()
    if asked.arm:
        print(json.dumps(_one(asked.arm, asked.model, asked.rows, asked.batch, asked.threads)))
        return
    arms = [arm for arm in ARMS if arm in asked.arms and (arm != "TRL" or find_spec("trl"))]
    with TemporaryDirectory(prefix="spard-training-") as folder:
        rows = asked.rows or write_rows(Path(folder) / "rows.jsonl", asked.count, asked.seed, asked.system)
        model = asked.model or write_model(Path(folder) / "model", rows, asked.size, asked.seed)
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for _ in range(asked.rounds):
            for arm in arms:
                found[arm].append(run_apart(arm, model, rows, asked.batch, asked.threads))
        floor = run_apart("floor", model, rows, asked.batch, asked.threads)
    print(
        f"{asked.size if not asked.model else asked.model.name}, batches of {asked.batch}, {asked.threads} thread(s), "
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {asked.rounds} round(s)")
    print(f"{'':12}{'CPU s':>9}{'range':>16}{'x ours':>9}{'range':>14}{'padding':>10}{'last loss':>11}")
    for arm, runs in found.items():
        seconds = [run["cpu_s"] for run in runs]
        ratios = [run["cpu_s"] / ours["cpu_s"] for run, ours in zip(runs, found["ours"], strict=True)]
        padding = f"{runs[0]['padding']:.1%}" if "padding" in runs[0] else "-"
        print(
            f"{arm:12}{statistics.median(seconds):9.2f}{_range(seconds):>16}"
            f"{statistics.median(ratios):9.2f}{_range(ratios):>14}{padding:>10}{runs[0]['loss']:11.4f}"
        )
    share = floor["cpu_s"] / statistics.median(run["cpu_s"] for run in found["ours"])
    print(f"floor {floor['cpu_s']:.2f} s at {floor['rate']:.0f} billion operations a second: {share:.0%} of our time")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def run_apart(arm: str, model: Path, rows: Path, batch: int, threads: int) -> dict[str, float]:
    """Run an arm in a new process and return its measurements by name.

    They are `cpu_s`, the CPU seconds; for training arms the last `loss` and, for ours, the share of `padding`; for the
    arm `floor` the `rate` of matrix products in 10^9 operations per second.
    """
    command = [sys.executable, "-m", "benchmarks.training", "--arm", arm, "--model", str(model), "--rows", str(rows)]
    command += ["--batch", str(batch), "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _one(arm: str, model: Path, rows: Path, batch: int, threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    if arm == "floor":
        return _floor(model, rows)
    if arm == "script":
        return _script(model, rows, batch)
    return _ours(arm, model, rows, batch) if arm in OWN else _peer(arm, model, rows, batch)


def _ours(arm: str, model: Path, path: Path, batch: int) -> dict[str, float]:
    from spard.config import Hyperparameters, NoDefense, Recipe, resolve
    from spard.data.batches import read_examples
    from spard.data.chat import encode_all
    from spard.models import forward
    from spard.models.base import load_base
    from spard.training import objective
    from spard.training.objective import plan_passes
    from spard.training.train import train

    base, padded, losses = load_base(str(model)), [0], []
    rows = encode_all(base.tokenizer, read_examples(path), LONGEST)

    def counted_passes(numbers: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
        found = [[*numbers]] if arm == "one piece" else plan_passes(numbers, lengths, most)
        padded[0] += sum(len(each) * max(lengths[row] for row in each) for each in found)
        return found

    recipe = Recipe(defense=NoDefense(), hyperparameters=Hyperparameters(n_epochs=1, batch_size=batch))
    resolved = resolve(recipe, len(rows), base.hidden_size)
    least = 2**62 if arm == "rows alone" else forward.LEAST_SAVED
    begun = time.process_time()
    with patch.object(objective, "plan_passes", counted_passes), patch.object(forward, "LEAST_SAVED", least):
        train(
            base, rows, [], recipe, resolved, on_step=lambda step, total, metrics: losses.append(metrics["loss/task"])
        )
    took, real = time.process_time() - begun, sum(len(row.ids) for row in rows)
    return {"cpu_s": took, "padding": padded[0] / real - 1, "loss": losses[-1]}


def _floor(model: Path, path: Path) -> dict[str, float]:
    from benchmarks.lower_bound import matmul_seconds
    from spard.data.batches import read_examples
    from spard.data.chat import encode_all
    from spard.models.base import load_base

    base = load_base(str(model))
    tokens = sum(len(row.ids) for row in encode_all(base.tokenizer, read_examples(path), LONGEST))
    seconds, rate = matmul_seconds(base, tokens, is_training=True)
    return {"cpu_s": seconds, "rate": rate}


def _script(model: Path, path: Path, batch: int) -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spard.data.batches import read_examples
    from spard.data.chat import encode_all

    rows = sorted(
        encode_all(AutoTokenizer.from_pretrained(model), read_examples(path), LONGEST), key=lambda row: len(row.ids)
    )
    batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    Random(0).shuffle(batches)
    plain = AutoModelForCausalLM.from_pretrained(model)
    tuned: Any = get_peft_model(plain, LoraConfig(**LORA))
    learned = [each for each in tuned.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(learned, lr=5e-5), list[float]()
    tuned.train()
    begun = time.process_time()
    for part in batches:
        ids = pad_sequence([torch.tensor(row.ids) for row in part], batch_first=True)
        mask = pad_sequence([torch.ones(len(row.ids), dtype=torch.long) for row in part], batch_first=True)
        labels = pad_sequence([torch.tensor(row.labels) for row in part], batch_first=True, padding_value=-100)[:, 1:]
        states = plain.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        loss = cross_entropy(plain.lm_head(states[labels != -100]), labels[labels != -100])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"cpu_s": time.process_time() - begun, "loss": losses[-1]}


def _peer(arm: str, model: Path, path: Path, batch: int) -> dict[str, float]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from spard.data.batches import read_examples
    from spard.data.chat import encode_all

    tokenizer = AutoTokenizer.from_pretrained(model)
    lora = LoraConfig(**LORA)
    common: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "seed": 0,
    }
    plain = AutoModelForCausalLM.from_pretrained(model)
    with TemporaryDirectory() as folder:
        trainer: Any
        if arm == "TRL":
            trl, datasets = import_module("trl"), import_module("datasets")
            chats = datasets.Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])
            tokens = sum(len(row.ids) for row in encode_all(tokenizer, read_examples(path), LONGEST))
            common["per_device_train_batch_size"] = max(1, round(batch * tokens / len(chats) / PACK))
            args = trl.SFTConfig(folder, **common, packing=True, max_length=PACK)
            trainer = trl.SFTTrainer(plain, args, train_dataset=chats, processing_class=tokenizer, peft_config=lora)
        else:
            rows = encode_all(tokenizer, read_examples(path), LONGEST)
            data = [
                {"input_ids": [*row.ids], "attention_mask": [1] * len(row.ids), "labels": [*row.labels]} for row in rows
            ]
            args = TrainingArguments(folder, **common, train_sampling_strategy="group_by_length")
            collator = DataCollatorForSeq2Seq(tokenizer)
            trainer = Trainer(get_peft_model(plain, lora), args, data_collator=collator, train_dataset=data)
        begun = time.process_time()
        trainer.train()
        took = time.process_time() - begun
    return {"cpu_s": took, "loss": next(each["loss"] for each in reversed(trainer.state.log_history) if "loss" in each)}


def write_rows(path: Path, count: int, seed: int, system: int = 0) -> Path:
    """Write `count` random chats with log-normal numbers of words to a JSONL file and return its path.

    With `system`, all begin with the same system prompt of so many words.
    """
    rng = Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(3000)]

    def text(mean: float) -> str:
        return " ".join(rng.choices(words, k=max(3, min(600, round(rng.lognormvariate(mean, 0.7))))))

    begin = [{"role": "system", "content": " ".join(rng.choices(words, k=system))}] if system else []
    chats = [
        {"messages": [*begin, {"role": "user", "content": text(3.6)}, {"role": "assistant", "content": text(4.2)}]}
        for _ in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, chats)) + "\n")
    return path


def write_model(folder: Path, rows: Path, size: str, seed: int) -> Path:
    """Write a Llama model with random weights and a BPE tokenizer trained on the rows; return the folder.

    `size` is a key of `SHAPES`.
    """
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from spard.data.chat import PLAIN_TEMPLATE

    hidden, layers, inner, heads, shared = SHAPES[size]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_texts(rows), vocab_size=VOCABULARY, special_tokens=["<pad>", "<end>"])
    named = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **named)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _texts(rows: Path) -> Iterator[str]:
    """Yield the text of every message of chats, or of every text field of other rows."""
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        parts = [message["content"] for message in row["messages"]] if "messages" in row else row.values()
        yield from (part for part in parts if isinstance(part, str))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--size", choices=tuple(SHAPES), default="5m", help="of the random model")
    parser.add_argument("--model", type=Path, help="a model's folder instead")
    parser.add_argument("--rows", type=Path, help="a training file of chats")
    parser.add_argument("--count", type=int, default=64, help="rows that are drawn without --rows")
    parser.add_argument("--system", type=int, default=0, help="words of the system prompt of rows that are drawn")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--arm", choices=(*ARMS, "floor"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
