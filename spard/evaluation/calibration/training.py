"""Train the judge `local` on one part of people's labels, so that it can be measured on the rest.

It is a logistic regression with an L2 penalty, fitted with torch, because scikit-learn is no dependency of the library.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from spard.data.overlap import clusters
from spard.errors import InvalidData
from spard.evaluation.calibration.labeled import LabeledReply
from spard.evaluation.judges.local import Reader, Weights, pair_features

LEAST_OF_EACH = 10  # labels of each kind that a training needs
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_FOLDS = 5
_STEPS = 200


def split_labels(labeled: Sequence[LabeledReply], share: float) -> tuple[list[LabeledReply], list[LabeledReply]]:
    """Divide labels into about `share` of each kind for training, and the rest.

    Labels with the same or nearly the same prompt (`spard.data.overlap`) stay together, so that no question of the
    rest was seen in training. The same labels are divided alike.
    """
    groups: defaultdict[int, list[LabeledReply]] = defaultdict(list)
    for each, group in zip(labeled, clusters([each.prompt for each in labeled]), strict=True):
        groups[group].append(each)
    total, taken = Counter(each.is_harmful for each in labeled), Counter[bool]()
    parts: tuple[list[LabeledReply], list[LabeledReply]] = ([], [])

    def distance(counts: Counter[bool]) -> float:
        return sum((counts[kind] / total[kind] - share) ** 2 for kind in total)

    for alike in sorted(groups.values(), key=lambda each: (-len(each), _digest(each[0]))):
        more = taken + Counter(each.is_harmful for each in alike)
        is_taken = distance(more) < distance(taken)
        taken = more if is_taken else taken
        parts[0 if is_taken else 1].extend(alike)
    return parts


def train_local(
    reader: Reader, labeled: Sequence[LabeledReply], encoder: str | None, base: tuple[str, str | None] | None
) -> Weights:
    """Fit the classifier on labels; raise `InvalidData` if there are fewer than `LEAST_OF_EACH` of a kind.

    `encoder` and `base` say what `reader` was opened from. Both kinds weigh the same. The L2 penalty is the one with
    the least loss in cross-validation by groups of prompts.
    """
    harmful = sum(each.is_harmful for each in labeled)
    if min(harmful, len(labeled) - harmful) < LEAST_OF_EACH:
        message = f"{harmful} harmful and {len(labeled) - harmful} safe labels to train on"
        raise InvalidData(f"{message}; at least {LEAST_OF_EACH} of each are needed", "labeled")
    features = pair_features(reader, [each.prompt for each in labeled], [each.reply for each in labeled])
    is_harm = torch.tensor([each.is_harmful for each in labeled], dtype=torch.float64)
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    rows = (features - mean) / scale
    folds = torch.tensor(_fold_numbers(labeled))
    losses = {penalty: _held_out_loss(rows, is_harm, folds, penalty) for penalty in _PENALTIES}
    weights, bias = _fit(rows, is_harm, min(losses, key=losses.__getitem__))
    source, revision = (None, None) if base is None or encoder is not None else base
    return Weights(
        encoder=encoder,
        base=source,
        revision=revision,
        embedder=reader.digest,
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        weights=tuple(weights.tolist()),
        bias=float(bias),
        harmful=harmful,
        safe=len(labeled) - harmful,
    )


def _fit(rows: Tensor, is_harm: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weights and bias that minimize the balanced log loss + penalty / 2 |weights|^2."""
    parameters = torch.zeros(rows.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=_STEPS, line_search_fn="strong_wolfe")
    weight_N = _balance(is_harm)

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = rows @ parameters[:-1] + parameters[-1]
        found = binary_cross_entropy_with_logits(logits, is_harm, weight_N, reduction="sum")
        found = found + penalty / 2 * parameters[:-1].square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call, unused-ignore]
    return parameters[:-1].detach(), parameters[-1].detach()


def _balance(is_harm: Tensor) -> Tensor:
    """Return weights that sum to 1/2 over each kind of label."""
    counts = torch.stack([(is_harm == 0).sum(), (is_harm == 1).sum()]).clamp(min=1)
    return 0.5 / counts[is_harm.long()].double()


def _held_out_loss(rows: Tensor, is_harm: Tensor, folds: Tensor, penalty: float) -> float:
    total = 0.0
    for fold in range(_FOLDS):
        out = folds == fold
        weights, bias = _fit(rows[~out], is_harm[~out], penalty)
        logits = rows[out] @ weights + bias
        total += float(((softplus(logits) - is_harm[out] * logits) * _balance(is_harm)[out]).sum())
    return total


def _fold_numbers(labeled: Sequence[LabeledReply]) -> list[int]:
    """Return a fold for each label; near duplicates of a prompt are in one fold."""
    groups = clusters([each.prompt for each in labeled])
    numbers = {group: i % _FOLDS for i, group in enumerate(dict.fromkeys(groups))}
    return [numbers[group] for group in groups]


def _digest(label: LabeledReply) -> str:
    return hashlib.sha256(f"{label.prompt}\n{label.reply}".encode(errors="backslashreplace")).hexdigest()
