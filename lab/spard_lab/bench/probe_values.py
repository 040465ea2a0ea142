"""What one undefended probe of a file shows, by detector; larger values are more suspicious.

For a prompt let h be the final hidden state of its last token and p the probabilities of the first token of its reply;
d is the probe's change of h, and TV the total variation between p with and without the probe.

    shift ratio    mean |d| / |h| of harmful prompts over that of harmless ones (`spard.training.undefended`)
    logit ratio    mean TV of harmful prompts over that of harmless ones
    answer shift   logit-difference amplification (`spard_lab.bench.answer_shift`)
    direction      cosine of the mean d of harmful prompts with u = mean h of harmless prompts - mean h of harmful ones
    plain texts    cosine with u of the mean d over the first tokens of texts outside of the chat template, without the
                   first token: the activation difference lens, arXiv 2510.13900
    spectrum       `spectrum` of the adapter, compared with the bank by `distances`; after arXiv 2602.15195, which
                   trains a classifier on poisoned adapters in place of the distance

CANARY (arXiv 2606.01695) projects d by a sparse autoencoder, which these base models do not have; u takes its place.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from spard.data.batches import collate
from spard.data.chat import EncodedSample
from spard.data.rows import Prompt
from spard.evaluation.ask import as_asked
from spard.evaluation.audit import sample
from spard.losses.anchor import prompt_states, unlabeled_prompt
from spard.models.base import Base
from spard.models.forward import final_states
from spard.training.undefended import MOST_PROMPTS, relative_shift, trained_probe
from spard_lab.bench.answer_shift import answer_shift, first_tokens

SCALARS = ("shift ratio", "logit ratio", "answer shift", "direction", "plain texts")
SPECTRUM = "spectrum"
_TEXT = 5  # first tokens of a text
_NEAREST = 3  # bank members that a spectrum is compared with

Kinds = Mapping[str, Tensor]


class Lookout:
    """A base model with the prompts of its audit, and its hidden states on them without a probe."""

    def __init__(self, base: Base, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        """Measure the base model; `prompts` are by kind, "harmful" and "benign"."""
        self.base = base
        asked = {kind: sample(prompts[kind], MOST_PROMPTS) for kind in ("harmful", "benign")}
        self._rows = {
            kind: [unlabeled_prompt(ids) for ids in as_asked(base.tokenizer, each)] for kind, each in asked.items()
        }
        texts = [base.tokenizer(each.prompt)["input_ids"][:_TEXT] for each in asked["benign"]]
        self._texts = [unlabeled_prompt(ids) for ids in texts if len(ids) == _TEXT]
        self._before, self._texts_before = self._states(), self._text_states()

    def measure(self, rows: Sequence[EncodedSample], *, steps: int, seed: int) -> dict[str, Any]:
        """Return the value of each detector for a probe on these rows, and the CPU seconds beside the shift ratio's."""
        with trained_probe(self.base, rows, steps=steps, seed=seed) as model:
            after = self._states()
            started = time.process_time()
            texts_after, found = self._text_states(), spectrum(model)
        values = measure_scalars(self.base.model.get_output_embeddings(), self._before, after)
        u = self._before["benign"].mean(0) - self._before["harmful"].mean(0)
        values["plain texts"] = _cosine((texts_after - self._texts_before).mean((0, 1)), u)
        return {"values": values, SPECTRUM: found, "added_cpu_s": round(time.process_time() - started, 3)}

    def _states(self) -> dict[str, Tensor]:
        pad = self.base.tokenizer.pad_token_id
        return {kind: prompt_states(self.base.model, rows, pad) for kind, rows in self._rows.items()}

    def _text_states(self) -> Tensor:
        """Return the states `[N, T, D]` of the texts' first tokens, without the very first."""
        model, was_training = self.base.model.eval(), self.base.model.training
        with torch.no_grad():
            batch = collate(self._texts, self.base.tokenizer.pad_token_id, self.base.device)
            states_NTD = final_states(model, batch.ids_BT)[:, 1:]
        model.train(was_training)
        return states_NTD


def measure_scalars(head: Any, before: Kinds, after: Kinds) -> dict[str, float]:
    """Return the values of the detectors that need only the last tokens of harmful and harmless prompts."""
    shift = {kind: relative_shift(before[kind], after[kind]) for kind in before}
    variation = {kind: _variation(head, before[kind], after[kind]) for kind in before}
    u = before["benign"].mean(0) - before["harmful"].mean(0)
    return {
        "shift ratio": _ratio(shift),
        "logit ratio": _ratio(variation),
        "answer shift": answer_shift(head, before, after),
        "direction": _cosine((after["harmful"] - before["harmful"]).mean(0), u),
    }


def spectrum(model: Any) -> list[float]:
    """Return the two spectral numbers of each kind of linear layer, averaged over the layers of that kind.

    They are the logarithm of the greatest singular value of the probe's product B A, and the entropy of the shares of
    energy of all its singular values, which are those of the r x r product of the triangular factors of B and of A's
    transpose.
    """
    parts = {name: part.detach().double() for name, part in model.named_parameters() if "lora_" in name}
    kinds: defaultdict[str, list[Tensor]] = defaultdict(list)
    for name, a in parts.items():
        if "lora_A" in name:
            b = parts[name.replace("lora_A", "lora_B")]
            values = torch.linalg.svdvals(torch.linalg.qr(b).R @ torch.linalg.qr(a.T).R.T)
            kinds[name.split(".lora_A")[0].rpartition(".")[2]].append(values)
    return [float(each) for kind in sorted(kinds) for each in _statistics(torch.stack(kinds[kind]))]


def _statistics(values_LR: Tensor) -> tuple[Tensor, Tensor]:
    shares_LR = values_LR.square() / values_LR.square().sum(1, keepdim=True)
    return values_LR[:, 0].log().mean(), torch.special.entr(shares_LR).sum(1).mean()


def distances(spectra: Sequence[Sequence[float]]) -> list[float]:
    """Return each spectrum's mean distance from its nearest others, in standard deviations of each part."""
    points = torch.tensor(spectra, dtype=torch.float64)
    scaled = points / points.std(0).clamp_min(1e-12)
    apart = torch.cdist(scaled, scaled).fill_diagonal_(torch.inf)
    return [float(each) for each in apart.sort(dim=1).values[:, :_NEAREST].mean(1)]


def _variation(head: Any, before_ND: Tensor, after_ND: Tensor) -> float:
    with torch.no_grad():
        change = first_tokens(head, after_ND).exp() - first_tokens(head, before_ND).exp()
    return float(change.abs().sum(1).mean()) / 2


def _ratio(by_kind: Mapping[str, float]) -> float:
    return by_kind["harmful"] / by_kind["benign"] if by_kind["benign"] else 1.0


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(cosine_similarity(one, other, dim=0))
