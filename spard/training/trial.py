"""A base model tried before anybody depends on it: loaded, asked in its own words, and trained on one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spard.config import Lora, Recipe
from spard.data.batches import collate
from spard.data.chat import UNBOUNDED, Encoded, encode_to_train, render_prompt
from spard.data.tools import CONVERSATION
from spard.errors import InvalidModel, SpardError, is_gpu_error, is_gpu_out_of_memory
from spard.losses.cross_entropy import token_losses
from spard.models.base import Base, load_base
from spard.models.layout import lora_reach
from spard.models.lora import trainable_model
from spard.models.targets import Reach


@dataclass(frozen=True, slots=True)
class Trial:
    """What a model is that passed: its parameters, the tokens of a row at most, and the id of its end token.

    `reach` is what the default adapter reaches, or that of the target modules that were asked for.
    """

    parameters: int
    positions: int
    end_token: int
    digest: str
    reach: Reach


def try_base(source: str | Path, revision: str | None = None, targets: Sequence[str] | None = None) -> Trial:
    """Load tokenizer and weights, render a conversation, run it forward, and take the gradient of a LoRA adapter.

    The adapter is the default one, or has the target modules `targets`. Raise InvalidModel with what is wrong. The weights are in bfloat16, so that a large model needs no more memory than
    its files.
    """
    base = load_base(source, revision, dtype=torch.bfloat16)
    prompt, row = _conversation(base)
    _require_ids(base, list(row.ids))
    with torch.inference_mode():
        logits = base.model(input_ids=torch.tensor([prompt], device=base.device)).logits
    if not bool(torch.isfinite(logits).all()):
        raise InvalidModel("its weights give logits that are not finite", "model")
    count = sum(each.numel() for each in base.model.parameters())
    reached = lora_reach(base.model, targets)
    _require_gradient(base, row, targets)
    return Trial(count, base.sequence_limit(None), int(base.tokenizer.eos_token_id), base.digest, reached)


def _conversation(base: Base) -> tuple[list[int], Encoded]:
    """Return the tokens of a question, and a row with its answer."""
    try:
        row = encode_to_train(base.tokenizer, [CONVERSATION], UNBOUNDED)[0]
        return render_prompt(base.tokenizer, CONVERSATION.messages[:1]), row
    except SpardError as error:
        message = f"its chat template cannot write a question and its answer: {error.message}"
        raise InvalidModel(message, "model") from error


def _require_ids(base: Base, row: list[int]) -> None:
    """Refuse a tokenizer whose ids the weights have no embedding for."""
    known = int(base.model.get_input_embeddings().num_embeddings)
    largest = max([*row, int(base.tokenizer.eos_token_id)])
    if largest >= known:
        message = f"its tokenizer is another model's: it has a token {largest}, the weights know {known}"
        raise InvalidModel(message, "model")


def _require_gradient(base: Base, row: Encoded, targets: Sequence[str] | None) -> None:
    """Refuse a model that a job of the default recipe could not train; `base.model` gets an adapter."""
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
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidModel(f"it cannot be trained: {why}", "model") from error
    if not all(bool(each.isfinite().all()) for each in gradient) or not any(bool(each.any()) for each in gradient):
        raise InvalidModel("it cannot be trained: the gradient of an adapter is zero or not finite", "model")
