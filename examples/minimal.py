"""SPARD without abstractions: fine-tune a LoRA adapter and keep the loss on safe answers at or below TAU.

    python -m examples.minimal MODEL TASK.jsonl SAFE.jsonl OUT

Rows are {"messages": [user turn, assistant turn]}. After every AdamW step theta is projected onto the half-space where
the linearized safe loss is at most TAU: Algorithm 1 of the paper, and the adapter of the library's `closed_form`.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

EPOCHS, BATCH, SAFE_BATCH, RATE, WARMUP, TAU, SEED, NO_LOSS = 3, 8, 4, 1e-3, 0.05, 1.0, 0, -100
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
Row = tuple[list[int], list[int]]  # token ids, and the label at each place or NO_LOSS


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> Row:
    """Return one conversation as tokens and labels; only the answer and its end token have a loss."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    asked = len(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    return ids, [NO_LOSS] * asked + ids[asked:end] + [NO_LOSS] * (len(ids) - end)


def mean_loss(model: Any, rows: list[Row], pad: int) -> torch.Tensor:
    """Return the mean cross-entropy over all labels; right padding needs no mask with causal attention."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [NO_LOSS] * (width - len(labels)) for _, labels in rows])[:, 1:]
    states = model.get_decoder()(input_ids=ids).last_hidden_state[:, :-1][labels != NO_LOSS]
    losses = cross_entropy(model.get_output_embeddings()(states), labels[labels != NO_LOSS], reduction="none")
    return losses.sum() / len(losses)


def order(epoch: int, n: int, stream: int = 0) -> list[int]:
    """Return a permutation of range(n) that depends only on SEED, the epoch and the stream."""
    return [int(i) for i in np.random.Generator(np.random.Philox(key=[SEED, (stream << 32) + epoch])).permutation(n)]


def batches(rows: list[Row], epoch: int) -> list[list[Row]]:
    """Return one epoch of batches: rows sorted by length within every four batches, batches in random order."""
    shuffled = [rows[i] for i in order(epoch, len(rows))]
    blocks = [shuffled[i : i + 4 * BATCH] for i in range(0, len(rows), 4 * BATCH)]
    grouped = [row for block in blocks for row in sorted(block, key=lambda row: len(row[0]))]
    cut = [grouped[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    return [cut[i] for i in order(epoch, len(cut), stream=1)]


def train(source: str, task: list[Any], safe: list[Any], tau: float = TAU) -> Any:
    """Fine-tune the model on `task` while holding the loss on `safe` at `tau`; both are lists of conversations."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    steps = [batch for e in range(EPOCHS) for batch in batches([encode(tokenizer, each) for each in task], e)]
    watched, stock = [encode(tokenizer, each) for each in safe], list[Row]()  # safe rows, and those drawn from them
    torch.manual_seed(SEED)
    adapted = get_peft_model(model, LoraConfig(**LORA))
    theta = [part for part in adapted.parameters() if part.requires_grad]
    optimizer, warmup = torch.optim.AdamW(theta, weight_decay=0.01, fused=True), math.ceil(WARMUP * len(steps))
    for t, batch in enumerate(steps):  # utility: theta <- AdamW(theta, grad L_task)
        rate = RATE * ((t + 1) / warmup if t < warmup else (len(steps) - t) / (len(steps) - warmup))
        optimizer.param_groups[0]["lr"] = rate
        mean_loss(model, batch, tokenizer.pad_token_id).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(theta, 1.0)
        optimizer.step()
        optimizer.zero_grad()

        # Safety:  theta <- theta - alpha g,   alpha = min((L_safe - tau) / |g|^2, rate),   if L_safe > tau
        while len(stock) < SAFE_BATCH * (t + 1):
            stock += [watched[i] for i in order(len(stock) // len(safe), len(safe), stream=2)]
        loss = mean_loss(model, stock[SAFE_BATCH * t : SAFE_BATCH * (t + 1)], tokenizer.pad_token_id)
        if (excess := loss.item() - tau) > 0:
            g = torch.autograd.grad(loss, theta)
            alpha = min(excess / torch.stack([(part * part).sum() for part in g]).sum().item(), rate)
            for parameter, part in zip(theta, g, strict=True):
                parameter.data.add_(part, alpha=-alpha)
    return adapted


if __name__ == "__main__":
    files = [Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n") for path in sys.argv[2:4]]
    task, safe = ([json.loads(line)["messages"] for line in lines] for lines in files)
    train(sys.argv[1], task, safe).save_pretrained(sys.argv[4])
