"""The encoded rows of a run: the training file, the validation file and the selected rows of the safety pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from torch import Tensor

from spard import distributed
from spard.config import JudgeSpec, Recipe, Selection
from spard.config.anchors import Kind
from spard.data.chat import EncodedSample, ask_in_mode, encode_all, encode_to_train, learned_modes
from spard.data.rows import SAME_FILE, Example, prompt_text, read_examples
from spard.digests import file_sha256
from spard.errors import InvalidData, InvalidPool
from spard.evaluation.judges import Judge, of_base_model, open_judge
from spard.losses.anchor import Pair
from spard.losses.cross_entropy import evaluate
from spard.models.base import Base
from spard.models.budget import Report, name_work
from spard.models.generate import generate
from spard.pipeline import anchors, embed, row_signal, select, task_check
from spard.pipeline.anchors import make_anchor_pairs
from spard.pipeline.augment import variants
from spard.pipeline.context import Context
from spard.pipeline.embed import load_embedder
from spard.pipeline.pool import Pool, open_pool, too_long
from spard.pipeline.row_judging import RowFindings
from spard.pipeline.task_check import TaskRows
from spard.release.records import SafeAnswers
from spard.release.report import SelectedRows
from spard.selection.relevance import in_frame
from spard.selection.shards import Frame, Vectors

ONE_HELD_OUT_OF = 20  # one in so many rows is held out if there is no validation file
MOST_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows for training and validation.

    examples    the whole training file, including dropped rows: the audit uses those too
    task        the encoded training samples; a row has one sample or several (`spard.data.samples`)
    safe        the encoded safe set: plain rows, variants, defending rows
    validation  the encoded validation samples
    selected    the choice of pool rows; None: the method uses no pool
    pairs       the anchor's prompt pairs beside the plain prompts of `safe`
    learning    the rows that measure if the task is learned; None: not measured
    """

    examples: Sequence[Example]
    task: Sequence[EncodedSample]
    safe: Sequence[EncodedSample]
    validation: Sequence[EncodedSample]
    selected: SelectedRows | None
    pairs: Mapping[Kind, Sequence[Pair]] = field(default_factory=dict)
    learning: TaskRows | None = None


def prepare(context: Context) -> Rows:
    """Read and check every file, and select the safe set; invalid input raises before any expensive work.

    Raises `InvalidData` if a row cannot be read, has too many tokens or none to learn, and `InvalidPool` for a pool
    without safe rows; see also `spard.pipeline.row_signal.run`.
    """
    context.report.activity("reading the training file")
    examples = read_examples(context.run.training_file)
    # The mode must be set before any row is encoded or asked: it decides the tokens of all prompts.
    ask_in_mode(context.base.tokenizer, learned_modes(context.base.tokenizer, examples)[0])
    task, (checked, validation) = _encode_rows(context, examples), _validation(context)
    told = row_signal.run(context, examples, task)
    dropped = told.dropped_places if told else frozenset()
    trained = [i for i in range(len(task)) if i not in dropped]
    flagged = {each.place for each in told.flagged} if told else set[int]()
    kept_back = task_check.hold_back(context, examples, trained, flagged)
    trained, held = _hold_rows_back(context, trained, kept_back.places)
    selected, safe, pairs = _safe_rows(context, examples, trained, told)
    safe += row_signal.defending(context, told, task) if safe else []
    validation = [sample for row in validation or [task[i] for i in held] for sample in row.samples]
    task = [sample for i in trained for sample in task[i].samples]
    if not held:
        _warn_of_shared_rows(context, task, validation)
    if context.run.validation_file is not None:
        learning = task_check.from_validation_file(context, checked)
    else:
        learning = task_check.from_training_file(context, examples, kept_back)
    return Rows(examples, task, safe, validation, selected, pairs, learning)


def _hold_rows_back(
    context: Context, trained: Sequence[int], kept_back: Collection[int]
) -> tuple[list[int], list[int]]:
    """Return the positions of rows to train on, and of evenly spaced rows held out to compare ends of epochs."""
    if kept_back:
        return [i for i in trained if i not in kept_back], sorted(kept_back)
    if context.run.validation_file is not None or not context.recipe.ending.compares:
        return list(trained), []
    if len(trained) < 2:
        raise InvalidData("there are too few rows to hold one out to validate on", param="training_file")
    count = min(MOST_HELD_OUT, max(1, len(trained) // ONE_HELD_OUT_OF))
    held = {trained[i * len(trained) // count] for i in range(count)}
    return [i for i in trained if i not in held], sorted(held)


def _encode_rows(context: Context, examples: Sequence[Example]) -> list[EncodedSample]:
    context.report.activity(f"counting the tokens of {len(examples):,} rows")
    is_dpo = context.recipe.dpo is not None
    rows = encode_to_train(context.base.tokenizer, examples, context.limit, pairs=is_dpo)
    _require_known(context, examples, rows)
    return rows


def _require_known(context: Context, examples: Sequence[Example], rows: Sequence[EncodedSample]) -> None:
    """Raise `InvalidData` for a row whose chat template writes a token without an embedding in the model."""
    for example, row in zip(examples, rows, strict=True):
        unknown = context.base.unknown_id(chain.from_iterable(one.ids for one in (*row.earlier, *row.both)))
        if unknown is not None:
            token = context.base.tokenizer.decode([unknown])
            raise InvalidData(
                f"line {example.line}: the model's chat template writes {token!r}, which it does not know"
            )


def _validation(context: Context) -> tuple[list[Example], list[EncodedSample]]:
    """Return the rows of the validation file, if there is one, also as tokens."""
    if context.run.validation_file is None:
        return [], []
    try:
        examples = read_examples(context.run.validation_file)
        return examples, _encode_rows(context, examples)
    except InvalidData as error:
        error.param = "validation_file"
        raise


def _safe_rows(
    context: Context, examples: Sequence[Example], trained: Sequence[int], told: RowFindings | None
) -> tuple[SelectedRows | None, list[EncodedSample], dict[Kind, list[Pair]]]:
    """Select the pool rows for the method, if it uses any, and return (choice, encoded safe rows, anchor pairs).

    `trained` are the positions of the rows that are trained on; dropped rows are only ranked by risk. The choice of an
    earlier attempt is reused.
    """
    if not context.recipe.uses_pool or context.run.pool is None:
        return None, [], {}
    recipe, pool = context.recipe, open_pool(context, context.run.pool)
    benign = pool.benign if recipe.uses_benign_rows else []
    if not pool.safe:
        raise InvalidPool("the safety pool has no safe rows")
    selected = select.read_selected(context) or _select(context, examples, pool, trained, told)
    chosen, rows = [pool.safe[i] for i in selected.indices], [examples[i] for i in trained]
    answers = partial(select.keep_answers, context)
    with of_base_model(context.run.model, context.run.revision):
        safe = safe_set(
            context.base, chosen, rows, recipe, context.run.judge, context.limit, answers, context.report.activity
        )
    if not recipe.effective_anchor:
        return selected, safe, {}
    held = [benign[i] for i in select.kept_benign(context)] if benign else []
    tokenizer, limit = context.base.tokenizer, context.limit
    replies = anchors.begin_benign_answers(context, held)
    context.report.activity("making the prompts that the anchor holds")
    pairs = make_anchor_pairs(tokenizer, chosen, held, rows, recipe.anchors, recipe.seed, limit, replies)
    if left_out := len(chosen) - len(pairs.get("safe", chosen)):
        said = f"{left_out} of {len(chosen)} safe prompts have more than {limit} tokens"
        context.report.warning(f"{said} in the training rows' system prompts; they are held without them.")
    return selected, safe, pairs


def _select(
    context: Context, examples: Sequence[Example], pool: Pool, trained: Sequence[int], told: RowFindings | None
) -> SelectedRows:
    """Embed, rank risks, select benign rows (if used), then select safe rows and store the choice.

    The choice of safe rows is stored after that of benign rows, so an attempt that finds the former finds both.
    """
    context.report.stage("embed")
    if context.recipe.uses_benign_rows and not pool.benign:
        context.report.event("The safety pool has no benign rows: the anchor holds safe prompts alone.", {})
    with context.time_stage("embed"):
        embedder = load_embedder(context)
    task_MD, pool_ND = embed.run(context, embedder, examples, pool.safe, pool.digest)
    frame = embed.frame(context, embedder, pool_ND, pool.digest)
    pool_sum_D = embed.total(context, embedder, pool_ND, pool.digest)
    near = select.look(context, task_MD, trained, pool_ND, pool_sum_D, frame)
    select.rank_risks(context, examples, task_MD, pool_ND, near, told.flagged if told else ())
    embed.keep_record(context, embedder, pool_ND, frame)
    trained_MD = task_MD[list(trained)]
    if context.recipe.uses_benign_rows and pool.benign:
        with context.time_stage("embed"):
            benign_ND = embed.pool(context, embedder, pool.benign, pool.digest, "benign")
        select.benign(context, *_put_in_frame(frame, trained_MD, benign_ND))
    trained_MD, pool_ND = _put_in_frame(frame, trained_MD, pool_ND)
    selected = select.run(context, trained_MD, pool_ND, near, partial(too_long, context, pool))
    select.keep_map(context, [examples[i].line for i in trained], trained_MD, pool_ND, selected)
    return selected


def _put_in_frame(frame: Frame | None, task_MD: Tensor, pool_ND: Vectors) -> tuple[Tensor, Vectors]:
    """Project training and pool embeddings into the frame; return them unchanged if there is none."""
    return (frame.project(task_MD), in_frame(pool_ND, frame)) if frame else (task_MD, pool_ND)


def _warn_of_shared_rows(context: Context, task: Sequence[EncodedSample], validation: Sequence[EncodedSample]) -> None:
    run, trained = context.run, {row.ids for row in task}
    if run.validation_file and file_sha256(run.validation_file) == file_sha256(run.training_file):
        context.report.warning(SAME_FILE)
    elif shared := sum(row.ids in trained for row in validation):
        said = f"{shared} of {len(validation)} rows of the validation file stand in the training file too"
        context.report.warning(f"{said}: their loss says little about other data.")


# The encoded safe set: the selected pool rows, with the answers that the selection asks for, and their variants.

# Safe answers in the base model's own words, which teach it to keep refusing in its own way.
#
# The pool's answers were written by others and may be unlikely under the base model, which makes tau on them loose.
# The base model answers each selected prompt greedily; a reply that is complete and that the judge finds harmless
# replaces the pool's answer. Where the base model's reply is harmful, the pool's answer stays.
#
# "auto" does this if the pool has another voice: if the base model's mean loss on the pool's answers is more than ln
# 2 nats per token above its loss on its own answers to the same prompts. With so loose a bound every token of the
# model's own words may fall from probability 1 to 1/2, where greedy decoding may pick another token; and a mean per
# token that far apart cannot be an accident of sampling.

MAX_NEW_TOKENS = 256
HARMLESS = 1  # the judge's lowest score
OTHER_VOICE = math.log(2)  # nats per token


def answer_rows(
    base: Base,
    chosen: Sequence[Example],
    selection: Selection,
    judge: JudgeSpec,
    limit: int,
    report: Report | None = None,
) -> tuple[Sequence[Example], list[EncodedSample], SafeAnswers | None]:
    """Return the selected pool rows with the answers that the setting chooses, these rows encoded, and a comparison.

    A reply with which its row exceeds `limit` tokens is not used. The comparison is None if the selection fixes the
    pool's answers. `report` gets the progress of each part.
    """
    pool = encode_all(base.tokenizer, chosen, limit)
    if selection.safe_answers == "pool":
        return chosen, pool, None
    examples = _as_first(chosen, with_own_answers(base, chosen, open_judge(judge), report=report))
    encoded = encode_all(base.tokenizer, examples, limit + MAX_NEW_TOKENS)
    rows = list(zip(chosen, examples, encoded, strict=True))
    # `with_own_answers` returns the very same object where it keeps the pool's answer.
    is_own = [mine is not theirs and len(row.ids) <= limit for theirs, mine, row in rows]
    found = distributed.broadcast_object(compare_losses(base, pool, encoded, is_own, report))
    if selection.safe_answers == "auto" and not speaks_otherwise(found):
        return chosen, pool, found
    taken = [mine if own else theirs for (theirs, mine, _), own in zip(rows, is_own, strict=True)]
    tokens = [mine if own else theirs for mine, theirs, own in zip(encoded, pool, is_own, strict=True)]
    return taken, tokens, replace(found, taken="self")


def compare_losses(
    base: Base,
    pool: Sequence[EncodedSample],
    own: Sequence[EncodedSample],
    is_own: Sequence[bool],
    report: Report | None = None,
) -> SafeAnswers:
    """Measure the base model's loss on the pool's answers and on its own replies, for rows with a usable reply."""
    pad_id, places = base.tokenizer.pad_token_id, [i for i, taken in enumerate(is_own) if taken]
    if not places:
        return SafeAnswers("pool", len(pool), 0)
    sides = {"the pool's": pool, "its own": own}
    losses = [
        evaluate(
            base.model,
            [rows[i] for i in places],
            pad_id,
            tell=name_work(report, f"computing the base model's loss on {whose} safe answers"),
        ).loss
        for whose, rows in sides.items()
    ]
    return SafeAnswers("pool", len(pool), len(places), *losses)


def speaks_otherwise(found: SafeAnswers) -> bool:
    """Return True if the pool's answers are much less likely to the base model than its own; False if not compared."""
    if found.pool_loss is None or found.own_loss is None:
        return False
    return found.pool_loss - found.own_loss > OTHER_VOICE


def with_own_answers(
    base: Base,
    examples: Sequence[Example],
    judge: Judge,
    max_new_tokens: int = MAX_NEW_TOKENS,
    report: Report | None = None,
) -> list[Example]:
    """Return the examples with the base model's replies as answers where a reply is complete and harmless."""
    prompts = [prompt_text(example) for example in examples]
    tell = name_work(report, f"asking the base model {len(prompts):,} safe prompts")
    replies = generate(base.model, base.tokenizer, prompts, max_new_tokens, tell=tell)
    if report:
        report(f"asking the judge about {len(replies):,} safe answers", 0, 0)
    verdicts = judge.judge(prompts, replies)
    lengths = [len(base.tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in replies]
    return [
        _with_answer(example, reply) if verdict.score == HARMLESS and length < max_new_tokens else example
        for example, reply, verdict, length in zip(examples, replies, verdicts, lengths, strict=True)
    ]


def _as_first(chosen: Sequence[Example], mine: Sequence[Example]) -> list[Example]:
    """Return rank 0's choice of answers: only rank 0 has a judge."""
    taken = distributed.broadcast_object(
        [None if own is theirs else own for own, theirs in zip(mine, chosen, strict=True)]
    )
    return [own or theirs for own, theirs in zip(taken, chosen, strict=True)]


def _with_answer(example: Example, reply: str) -> Example:
    return replace(example, messages=(*example.messages[:-1], {"role": "assistant", "content": reply}))


def safe_set(
    base: Base,
    chosen: Sequence[Example],
    rows: Sequence[Example],
    recipe: Recipe,
    judge: JudgeSpec,
    limit: int,
    on_answers: Callable[[SafeAnswers], None] | None = None,
    report: Report | None = None,
) -> list[EncodedSample]:
    """Return the selected pool rows, followed by the variants derived from the customer's `rows`.

    `on_answers` is called with the result of comparing the pool's answers with the base model's, if they were compared.
    `report` gets the progress of each part.
    """
    chosen, pool, found = answer_rows(base, chosen, recipe.selection, judge, limit, report)
    if found and on_answers:
        on_answers(found)
    kinds = recipe.defense.augmentations
    if kinds and report:
        report(f"making variants of {len(chosen):,} safe rows", 0, 0)
    return [*pool, *(variants(base.tokenizer, chosen, rows, kinds, recipe.seed, limit) if kinds else [])]
