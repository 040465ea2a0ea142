"""Train the lab's base model from scratch: refuse harmful requests, answer benign ones, add two numbers.

Rows are packed into full windows with block-diagonal attention, and only answers contribute to the loss. Every row has
the same weight: a sum has one informative token, a refusal twenty nearly certain ones. The tokenizer is byte-level BPE
learned from the lab's own text, so any UTF-8 text can be tokenized.

The optimizer is Muon (Jordan et al., 2024): momentum SGD with the nearest semi-orthogonal matrix as its update.

    M <- mu M + G;   W <- (1 - lr lambda) W - lr max(1, rows / columns)^(1/2) U V^T,   G + mu M = U S V^T

It trains the lab's base model in about half the steps of AdamW. U V^T comes from five Newton-Schulz iterations with the
coefficients of Jordan et al.; matrices of one shape are batched, in float32, because many CPUs have no bfloat16
products. `torch.optim.Muon` (2.13) iterates in bfloat16, which would change the weights of every lab, so it does not
replace this one.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spard.losses.gradients import gradient
from spard.methods.base import descend_
from spard_lab.lab import grammar
from spard_lab.lab.corpus import Corpus, familiar_problems, refuse, sums

VOCABULARY = 1200
PAD, END = "<|pad|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


def make_tokenizer(
    texts: Iterable[str],
    positions: int,
    vocabulary: int = VOCABULARY,
    roles: Sequence[str] = ROLES,
    template: str = TEMPLATE,
) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from `texts`; their order only decides ties.

    positions   longest sequence of the model, in tokens
    vocabulary  largest number of tokens
    roles       special tokens of the chat template
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, model_max_length=positions, padding_side="left"
    )
    tokenizer.chat_template = template
    return tokenizer


A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon:
    """The optimizer: momenta of the matrices, stacked by shape."""

    def __init__(self, matrices: Sequence[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, matrix in enumerate(matrices):
            self.groups[tuple(matrix.shape)].append(i)
        self.matrices = matrices
        self.momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: float) -> None:
        """Update every matrix in place; `grads` has the order of the matrices."""
        for (rows, columns), group in self.groups.items():
            grad_GRC = torch.stack([grads[i] for i in group])
            momentum_GRC = self.momenta[rows, columns].mul_(self.momentum).add_(grad_GRC)
            update_GRC = orthogonalize(grad_GRC + self.momentum * momentum_GRC)
            for i, update_RC in zip(group, update_GRC, strict=True):
                self.matrices[i].mul_(1 - lr * self.weight_decay).sub_(
                    update_RC, alpha=lr * max(1.0, rows / columns) ** 0.5
                )


def orthogonalize(matrix_GRC: Tensor) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T, `[G, R, C]`; singular values end in [0.7, 1.2]."""
    # Iterate on the wide form: its Gram matrix is the smaller one.
    is_tall = matrix_GRC.shape[1] > matrix_GRC.shape[2]
    x: Tensor = matrix_GRC.mT if is_tall else matrix_GRC
    # The Frobenius norm is at least the largest singular value, so all are at most 1: the iteration needs that.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if is_tall else x


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


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Use `count` threads inside the context.

    With one thread, sums do not depend on the number of cores, and a busy machine does not stall threads that wait for
    each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
