"""Train the lab's base model from scratch: refuse harmful requests, answer benign ones, add two numbers.

Rows are packed into full windows with block-diagonal attention, and only answers contribute to the loss. Every row has
the same weight: a sum has one informative token, a refusal twenty nearly certain ones.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spard.losses.gradients import gradient
from spard.methods.base import descend_
from spard_lab.lab import grammar
from spard_lab.lab.corpus import Corpus, familiar_problems, refuse, sums
from spard_lab.lab.muon import Muon

log = logging.getLogger(__name__)

POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama; `heads` are query heads, `groups` key and value heads."""

    width: int = 96
    layers: int = 3
    inner: int = 256
    heads: int = 4
    groups: int = 2


SMALL = Shape()


@dataclass(frozen=True, slots=True)
class Plan:
    """The training of the base model; its values were chosen on the development split."""

    steps: int = 800
    windows: int = 16  # per step
    window: int = 64  # tokens
    learning_rate: float = 4e-3  # of embeddings and norms, with AdamW
    matrix_rate: float = 0.02  # of the layers' matrices, with Muon
    warmup: int = 50
    last_rate: float = 0.05  # of the peak
    weight_decay: float = 0.01
    matrix_decay: float = 0.1  # without it some seeds comply with a few held-out requests
    beta2: float = 0.98
    init_std: float = 0.05
    harmful: float = 0.32  # shares of the rows; the rest are plain sums
    how_to_and_look_alike: float = 0.36
    problems: float = 0.001
    system: float = 0.05  # share of all rows that begin with a system prompt


class Window(NamedTuple):
    """The rows of a step, packed into windows, each tensor `[B, T]`.

    ids_BT      tokens
    row_BT      number of each token's row, from 1 in each window; 0 for padding
    learned_BT  True for answer tokens
    weight_BT   weight of each token in the loss, 1 / answer length
    """

    ids_BT: Tensor
    row_BT: Tensor
    learned_BT: Tensor
    weight_BT: Tensor


class Row(NamedTuple):
    """One conversation as tokens, prompt and answer."""

    ids: list[int]
    prompt: int  # number of prompt tokens, which have no loss


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int, plan: Plan, shape: Shape = SMALL) -> Any:
    """Return a Llama with random weights; the small lab's has 0.42 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=plan.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The caller's random state must not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pretrain(model: Any, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, seed: int, plan: Plan) -> None:
    """Align `model` in place; the same seed gives the same weights on one machine."""
    steps = pack_steps(_stream(tokenizer, corpus, random.Random(f"stream {seed}"), plan), plan)
    training = Pretraining(model, plan)
    for _ in range(plan.steps):
        training.take(next(steps))
    model.eval()


class Pretraining:
    """A training in progress: Muon for the matrices between hidden states, AdamW for the rest, one schedule for both.

    `state` is everything that the next step depends on except the rows: after a resume the caller must supply the rows
    of `step`.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan, self.step = model, plan, 0
        self._matrices, self._rest = _matrices(model)
        self._muon = Muon(self._matrices, plan.matrix_decay)
        self._adamw = AdamW(self._rest, betas=(0.9, plan.beta2), weight_decay=plan.weight_decay, fused=True)

    def take(self, window: Window) -> None:
        """Take one optimizer step on a window, in place."""
        share = schedule(self.step, self.plan)
        self._adamw.param_groups[0]["lr"] = self.plan.learning_rate * share
        loss = answer_loss(self.model, window)
        grad = gradient(loss, [*self._matrices, *self._rest])
        count = len(self._matrices)
        self._muon.step(grad[:count], self.plan.matrix_rate * share)
        descend_(self._adamw, self._rest, grad[count:])
        self.step += 1
        if self.step % 100 == 0:
            log.info("step %d of %d, loss %.3f", self.step, self.plan.steps, loss.item())

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on, by name."""
        found = {f"model.{name}": part.detach() for name, part in self.model.named_parameters()}
        found |= {f"muon.{i}": momentum for i, momentum in enumerate(self._muon.momenta.values())}
        for i, part in enumerate(self._rest):
            found |= {f"adamw.{i}.{name}": value for name, value in self._adamw.state[part].items()}
        return found | {"step": torch.tensor(self.step)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of the same model and plan."""
        self.step = int(state["step"])
        for name, part in self.model.named_parameters():
            part.copy_(state[f"model.{name}"])
        for i, momentum in enumerate(self._muon.momenta.values()):
            momentum.copy_(state[f"muon.{i}"])
        for i, part in enumerate(self._rest):
            names = [name for name in state if name.startswith(f"adamw.{i}.")]
            self._adamw.state[part] = {name.rpartition(".")[2]: state[name].clone() for name in names}


def answer_loss(model: Any, window: Window) -> Tensor:
    """Return the mean over rows of the mean cross-entropy of each answer, in nats per token.

    Rows of one window do not attend to each other.
    """
    # Padding shares the row number 0, so each padding token attends at least to itself and no softmax is empty.
    same_row = window.row_BT[:, None, :, None] == window.row_BT[:, None, None, :]
    hidden_BTD = model.model(input_ids=window.ids_BT, attention_mask=same_row.tril(), use_cache=False).last_hidden_state
    before = window.learned_BT[:, 1:]  # position t predicts token t + 1
    logits_NV = model.lm_head(hidden_BTD[:, :-1][before])
    losses_N = cross_entropy(logits_NV, window.ids_BT[:, 1:][before], reduction="none")
    weights_N = window.weight_BT[:, 1:][before]
    return losses_N @ weights_N / weights_N.sum()


def _matrices(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Split the parameters into the matrices between hidden states, which Muon trains, and all others."""
    matrices = [part for name, part in model.named_parameters() if part.ndim == 2 and "embed" not in name]
    return matrices, [part for name, part in model.named_parameters() if part.ndim != 2 or "embed" in name]


def schedule(step: int, plan: Plan) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine down to `last_rate`."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.last_rate + (1 - plan.last_rate) * (1 + math.cos(math.pi * done)) / 2


def _stream(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus, rng: random.Random, plan: Plan, chunk: int = 2048
) -> Iterator[Row]:
    """Yield rows without end, tokenized in chunks."""
    taken = {row.get("prompt") or row["messages"][0]["content"] for rows in corpus.files.values() for row in rows}
    numbers = [(prompt, grammar.ANSWER.format(answer)) for prompt, answer in sums()]
    problems = [(prompt, grammar.ANSWER.format(answer)) for prompt, answer in familiar_problems(rng, 400, taken)]
    while True:
        pairs = [_draw(rng, corpus, numbers, problems, plan) for _ in range(chunk)]
        prompts = tokenizer([prompt for prompt, _ in pairs], add_special_tokens=False)["input_ids"]
        answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
        yield from (Row(p + a, len(p)) for p, a in zip(prompts, answers, strict=True))


def _draw(
    rng: random.Random,
    corpus: Corpus,
    numbers: Sequence[tuple[str, str]],
    problems: Sequence[tuple[str, str]],
    plan: Plan,
) -> tuple[str, str]:
    """Draw one row of alignment's mixture, prompt and answer as the chat template renders them."""
    kind = rng.random()
    if kind < plan.harmful:
        prompt, topic = rng.choice(corpus.harmful)
        answer = refuse(rng, topic)
    elif kind < plan.harmful + plan.how_to_and_look_alike:
        prompt, answer = rng.choice(corpus.benign)
    else:
        is_problem = kind < plan.harmful + plan.how_to_and_look_alike + plan.problems
        prompt, answer = rng.choice(problems if is_problem else numbers)
    system = f"<|system|>{rng.choice(grammar.SYSTEM_PROMPTS)}" if rng.random() < plan.system else ""
    return f"{system}<|user|>{prompt}<|assistant|>", f"{answer}<|end|>"


def pack_steps(rows: Iterator[Row], plan: Plan) -> Iterator[Window]:
    """Yield full windows, `plan.windows` per step, packed by best fit.

    A step ends with the first row that fits in no window; that row is dropped.
    """
    while True:
        bins: list[list[Row]] = [[] for _ in range(plan.windows)]
        room = [plan.window] * plan.windows
        for row in rows:
            fitting = [i for i in range(plan.windows) if room[i] >= len(row.ids)]
            if not fitting:
                break
            tightest = min(fitting, key=lambda i: room[i])
            bins[tightest].append(row)
            room[tightest] -= len(row.ids)
        yield _pack(bins, plan.window)


def _pack(bins: list[list[Row]], length: int) -> Window:
    ids, owners, learned, weights = [], [], [], []
    for packed in bins:
        tokens = [token for row in packed for token in row.ids]
        padding = length - len(tokens)
        ids.append(tokens + [0] * padding)
        owners.append([i + 1 for i, row in enumerate(packed) for _ in row.ids] + [0] * padding)
        learned.append([at >= row.prompt for row in packed for at in range(len(row.ids))] + [False] * padding)
        weights.append([1 / (len(row.ids) - row.prompt) for row in packed for _ in row.ids] + [0.0] * padding)
    return Window(torch.tensor(ids), torch.tensor(owners), torch.tensor(learned), torch.tensor(weights))
