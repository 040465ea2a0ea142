"""The identity of a run: a digest of everything that decides its numbers, by which it finds its own resume states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from spard.config import Recipe, Resolved
from spard.config.added import without_added
from spard.config.anchors import Kind
from spard.data.chat import Encoded
from spard.losses.anchor import Pair


@dataclass(frozen=True)
class Identity:
    """The facts that decide a run's numbers: base model, recipe, starting adapter and rows.

    held  the validation rows if they influence the result: they compare epochs, or are preference pairs with references
    """

    base_digest: str
    recipe: Recipe
    resolved: Resolved
    started_from: str | None
    task: Sequence[Encoded]
    safe: Sequence[Encoded]
    pairs: Mapping[Kind, Sequence[Pair]]
    held: Sequence[Encoded]

    @cached_property
    def digest(self) -> str:
        """The digest of all facts; computed once, because it hashes all rows."""
        return self._digest(checkpointing=False)

    def matches(self, run: str) -> bool:
        """Return True if a resume state with the digest `run` belongs to this run.

        Older versions included `gradient_checkpointing` in the digest; their resume states match too.
        """
        return run == self.digest or run == self._digest(checkpointing=True)

    def _digest(self, *, checkpointing: bool) -> str:
        """Return the digest without the settings that only change rounding or timing, such as the micro-batch size."""
        same = replace(self.recipe, checkpoint_every_s=1.0, micro_batch_size=None, pass_tokens=None, sharding="none")
        same = replace(same, gradient_checkpointing=checkpointing)
        recipe = without_added(asdict(same))
        recipe["anchor_weight"] = recipe.pop("anchor")  # its name in 0.1, whose resume states still match
        recipe["audit"] = {"suites": None, "max_prompts": 500, "max_new_tokens": 64}  # the defaults of 0.1
        rows = [(each.ids, each.labels) for row in (*self.task, *self.safe) for each in row.both]
        pairs = {kind: [(pair.asked.ids, pair.kept.ids) for pair in found] for kind, found in self.pairs.items()}
        held = [[each.ids, each.labels] for row in self.held for each in row.both]
        facts = [self.base_digest, recipe, asdict(self.resolved), rows, *filter(None, [self.started_from, pairs, held])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
