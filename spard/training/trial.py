"""The trial of a base model before it is offered: load it, let it reply, and train it on one row."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from spard.config import Lora, Recipe
from spard.data.batches import collate
from spard.data.chat import (
    UNBOUNDED,
    EncodedSample,
    encode_to_train,
    fix_template_arguments,
    get_renderer,
    render_prompt,
)
from spard.data.template_arguments import argument_fault
from spard.data.template_card import TemplateCard, template_card
from spard.data.tools import CONVERSATION
from spard.errors import SpardError, TemplateFault, UnfitModel, is_gpu_error, is_gpu_out_of_memory
from spard.losses.cross_entropy import token_losses
from spard.models import budget
from spard.models.base import Base, load_base
from spard.models.devices import threads_of_jobs
from spard.models.generate import complete
from spard.models.lora import lora_reach, trainable_model
from spard.models.stored_tokenizer import whole_model_fault
from spard.models.targets import Reach

T = TypeVar("T")
_WITHOUT_ADAPTER = "__base__"  # PEFT's adapter name for rows without an adapter

PROBE_S = 5.0  # seconds spent on each speed measurement, roughly
_REPLIES, _SHORT_REPLY, _WHOLE_REPLY = 128, 8, 128  # replies of the speed probe; tokens of a short and a whole one
_BATCH, _PASSES, _REPEATS = 16, 8, 3
RENDERING_S = 10.0  # seconds of CPU time for rendering two short texts


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speed of a model on this machine.

    generated_per_s  tokens per second of replies written at once.
    reply_tokens     mean tokens of a reply.
    trained_per_s    tokens per second of a training batch.
    load_s           seconds to load the model.
    """

    generated_per_s: float
    reply_tokens: float
    trained_per_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Facts about a base model that passed its trial.

    parameters         number of its weights.
    positions          most tokens of a row.
    end_token          id of its end token.
    reach              the modules that the default adapter reaches, or one with the target modules of the trial.
    card               what its chat template supports.
    rates              measured speed.
    whole_model_fault  why its weights cannot all be trained, or None.
    """

    parameters: int
    positions: int
    end_token: int
    digest: str
    reach: Reach
    card: TemplateCard
    rates: Rates
    whole_model_fault: str | None = None


def try_base(
    source: str | Path,
    revision: str | None = None,
    targets: Sequence[str] | None = None,
    template_arguments: Mapping[str, object] | None = None,
) -> Trial:
    """Load tokenizer and weights, render a conversation, run it forward, and take the gradient of a LoRA adapter.

    The adapter is the default one, or has the target modules `targets`. `template_arguments` are fixed for the chat
    template. Weights have the dtype that jobs use: bfloat16 on a GPU, float32 on a CPU. Raises `InvalidModel` (often
    its subclass `UnfitModel`) that says what is wrong.
    """
    started = time.perf_counter()
    base = load_base(source, revision)
    load_s = time.perf_counter() - started
    prompt, row, card = _conversation(base, template_arguments or {})
    _require_ids(base, list(row.ids))
    with torch.inference_mode():
        logits = base.model(input_ids=torch.tensor([prompt], device=base.device)).logits
    if not bool(torch.isfinite(logits).all()):
        raise UnfitModel("its weights give logits that are not finite", "model")
    count = sum(each.numel() for each in base.model.parameters())
    reached = lora_reach(base.model, targets)
    _require_reply(base, prompt)
    with threads_of_jobs(base.model):
        rows = _rows_at_once(base, prompt)
        generated_per_s, reply_tokens = _generation_rate(base, prompt, rows)
        model = _require_gradient(base, row, targets)
        trained_per_s = _training_rate(base, model, row, min(rows, _BATCH))
    _require_own_adapters(model, prompt)
    rates = Rates(generated_per_s, reply_tokens, trained_per_s, round(load_s, 3))
    end_token, fault = int(base.tokenizer.eos_token_id), whole_model_fault(base.tokenizer)
    return Trial(count, base.sequence_limit(None), end_token, base.digest, reached, card, rates, fault)


def _rows_at_once(base: Base, prompt: list[int]) -> int:
    """Return how many replies the probe writes at once: as many as an audit, fewer on a slow machine."""
    alone_s, _ = _fastest(lambda: complete(base.model, base.tokenizer, [prompt], 2), _REPEATS, base.device)
    most = budget.generated_rows(base.model, len(prompt), _WHOLE_REPLY)
    return max(1, min(_REPLIES, most, int(PROBE_S / alone_s)))


def _generation_rate(base: Base, prompt: list[int], count: int) -> tuple[float, float]:
    """Return the tokens per second of `count` replies written at once, and the mean tokens of a reply.

    Short replies come first and decide if whole ones are affordable; else a reply counts as long as it may be.
    """
    for limit in (_SHORT_REPLY, _WHOLE_REPLY):
        write = partial(complete, base.model, base.tokenizer, [prompt] * count, limit)
        seconds, texts = _fastest(write, _REPEATS, base.device)
        lengths = [max(1, len(base.tokenizer.encode(text, add_special_tokens=False))) for text in texts]
        rate, mean = sum(lengths) / seconds, sum(lengths) / len(lengths)
        # Replies that end well before the limit are as long as they get, so whole ones would measure the same.
        if mean < 0.9 * limit or _WHOLE_REPLY * count / rate > PROBE_S:
            break
    return round(rate, 3), round(mean if mean < 0.9 * limit else _WHOLE_REPLY, 1)


def _training_rate(base: Base, model: Any, row: EncodedSample, count: int) -> float:
    """Return the tokens per second of forward and backward passes over batches of `count` rows."""
    # Rows that begin alike would go through the model once, up to where they differ.
    rows = [replace(row, ids=(token, *row.ids[1:])) for token in range(count)]
    batch = collate(rows, base.tokenizer.pad_token_id, base.device)
    theta = [each for each in model.parameters() if each.requires_grad]
    token_losses(model, batch)  # the first pass warms up

    def train_once() -> object:
        loss = token_losses(model, batch).loss_S.mean()
        torch.autograd.grad(loss, theta, allow_unused=True)
        return loss.item()  # a GPU has done all of it then

    seconds, _ = _fastest(train_once, _PASSES, base.device)
    return round(count * row.tokens / seconds, 3)


def _fastest(do: Callable[[], T], repeats: int, device: torch.device) -> tuple[float, T]:
    """Return the seconds of the fastest of at most `repeats` runs within `PROBE_S`, and the last result.

    On a CPU a first run has one thread and counts with its CPU time, which other work on the machine does not change.
    Threads that wait for one another and for a core took 300 times as long: an estimate of a quarter of an hour became
    two days.
    """
    threads, began, taken = torch.get_num_threads(), time.perf_counter(), list[float]()
    if device.type == "cpu" and threads > 1:
        busy = time.process_time()
        torch.set_num_threads(1)
        try:
            result = do()
        finally:
            torch.set_num_threads(threads)
        taken.append(max(time.process_time() - busy, 1e-6))
    while True:
        # Another run must fit into the probe's time.
        spent_s = time.perf_counter() - began
        if len(taken) == repeats or (taken and spent_s + spent_s / len(taken) > PROBE_S):
            return min(taken), result
        started = time.perf_counter()
        result = do()
        taken.append(max(time.perf_counter() - started, 1e-6))


def _conversation(
    base: Base, template_arguments: Mapping[str, object]
) -> tuple[list[int], EncodedSample, TemplateCard]:
    """Return the tokens of a question, a row with its answer, and the card of the chat template.

    Raises `UnfitModel` if the template fails or takes too long, or cannot be given these arguments.
    """
    try:
        with at_most(RENDERING_S):
            if fault := argument_fault(base.tokenizer, template_arguments):
                raise UnfitModel(f"template_arguments: {fault}", "template_arguments")
            fix_template_arguments(base.tokenizer, template_arguments)
            renderer = get_renderer(base.tokenizer)
            row = encode_to_train(base.tokenizer, [CONVERSATION], UNBOUNDED)[0]
            card = template_card(renderer)
            return render_prompt(base.tokenizer, CONVERSATION.messages[:1]), row, card
    except TimeoutError as error:
        message = "its chat template takes too long to write a question and its answer: give one without such loops"
        raise UnfitModel(message, "model") from error
    except TemplateFault as error:
        raise UnfitModel(f"its chat template {error.message}", "model") from error
    except UnfitModel:
        raise
    except SpardError as error:
        message = f"its chat template cannot write a question and its answer: {error.message}"
        raise UnfitModel(message, "model") from error


def _require_ids(base: Base, row: list[int]) -> None:
    """Raise `UnfitModel` if the chat template writes a control token without an embedding."""
    unknown = base.unknown_id(row)
    if unknown is not None:
        message = (
            f"its chat template writes {base.tokenizer.decode([unknown])!r}, for which the weights have no embedding"
        )
        raise UnfitModel(message, "model")


def _require_reply(base: Base, prompt: list[int]) -> None:
    """Raise `UnfitModel` if the model cannot continue from its cache of keys and values, as every reply needs."""
    try:
        complete(base.model, base.tokenizer, [prompt], 2)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if is_gpu_error(error) or is_gpu_out_of_memory(error):
            raise
        why = f"it cannot write replies as they are written here: {_first_line(error).removesuffix('.')}"
        raise UnfitModel(f"{why}; offer another model", "model") from error


@torch.inference_mode()
def _require_own_adapters(model: Any, prompt: list[int]) -> None:
    """Raise `UnfitModel` if two rows of a batch cannot have different adapters, as in the engine."""
    for name, part in model.named_parameters():
        if ".lora_B." in name:
            # PEFT starts B at zero: the adapter would change nothing, and both rows would always be equal.
            part.fill_(0.1)
    ids_2T = torch.tensor([prompt, prompt], device=model.device)
    names = [_WITHOUT_ADAPTER, model.active_adapter]
    logits_2TV = model.eval()(input_ids=ids_2T, adapter_names=names).logits
    if torch.equal(logits_2TV[0], logits_2TV[1]):
        kind = type(model.get_base_model()).__name__
        message = (
            f"PEFT gives all rows of a {kind} one adapter, and rows are served with their own: offer another model"
        )
        raise UnfitModel(message, "model")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _require_gradient(base: Base, row: EncodedSample, targets: Sequence[str] | None) -> Any:
    """Return `base.model` with an adapter; raise `UnfitModel` if a job of the default recipe could not train it."""
    recipe = Recipe(lora=Lora(target_modules=None if targets is None else tuple(targets)))
    batch = collate([row], base.tokenizer.pad_token_id, base.device)
    try:
        with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []):
            model = trainable_model(base.model, recipe)
            theta = [each for each in model.parameters() if each.requires_grad]
            loss = token_losses(model, batch).loss_S.mean()
            gradient = torch.autograd.grad(loss, theta, allow_unused=True, materialize_grads=True)
    except (SpardError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        if is_gpu_error(error) or is_gpu_out_of_memory(error):
            raise
        raise UnfitModel(f"it cannot be trained: {_first_line(error)}", "model") from error
    if not all(bool(each.isfinite().all()) for each in gradient) or not any(bool(each.any()) for each in gradient):
        raise UnfitModel("it cannot be trained: the gradient of an adapter is zero or not finite", "model")
    return model


# A CPU time limit for untrusted programs that run in this process: chat templates.


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block after so many seconds of CPU time; only in the main thread.

    Python code is interrupted between two bytecodes; a long library call only when it returns.
    """
    # Python delivers signals to the main thread only, so other threads run without a limit.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
