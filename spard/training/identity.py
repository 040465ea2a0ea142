"""What a resume state knows its run by: a digest of everything that decides the run's numbers."""

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
    """A run's base model by its digest, its recipe, the adapter that it started from, and its rows.

    held  the validation rows where they decide something: which end of an epoch is kept, or the references of pairs
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
        """The digest; all rows are hashed, and that once for all resume states."""
        return self._digest(checkpointing=False)

    def matches(self, run: str) -> bool:
        """Whether a resume state is this run's; older versions told apart what was run with checkpointing."""
        return run == self.digest or run == self._digest(checkpointing=True)

    def _digest(self, *, checkpointing: bool) -> str:
        """Digest what decides the numbers; how a run is cut only rounds them."""
        same = replace(self.recipe, checkpoint_every_s=1.0, micro_batch_size=None, pass_tokens=None, sharding="none")
        same = replace(same, gradient_checkpointing=checkpointing)
        recipe = without_added(asdict(same))
        recipe["anchor_weight"] = recipe.pop("anchor")  # its name in 0.1, whose resume states go on
        recipe["audit"] = {"suites": None, "max_prompts": 500, "max_new_tokens": 64}  # the defaults of 0.1, likewise
        rows = [(each.ids, each.labels) for row in (*self.task, *self.safe) for each in row.both]
        pairs = {kind: [(pair.asked.ids, pair.kept.ids) for pair in found] for kind, found in self.pairs.items()}
        held = [[each.ids, each.labels] for row in self.held for each in row.both]
        facts = [self.base_digest, recipe, asdict(self.resolved), rows, *filter(None, [self.started_from, pairs, held])]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
