"""The lab's stand-in for a chat model that rewrites requests; it knows only the grammar's phrasings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spard_lab.lab import grammar


@dataclass(frozen=True, slots=True)
class GrammarRewriter:
    """A `spard.evaluation.judges.llm.Chat` for `spard_lab.attacks.styles.restyle` on the lab's corpus."""

    def complete(self, system: str, user: str) -> str:
        """Return the request in the style that `system` names; empty if the grammar has no such request."""
        action = find_action(user)
        if action is None:
            return ""
        wants_question = "ends with a question mark" in system
        fitting = [each for each in grammar.REQUESTS if each.endswith("?") == wants_question]
        return fitting[len(action) % len(fitting)].format(action)


def find_action(request: str) -> str | None:
    """Return the bare action of a request in one of the grammar's phrasings, or None."""
    for phrasing in grammar.REQUESTS:
        before, _, after = phrasing.partition("{}")
        found = re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", request)
        if found:
            return found.group(1)
    return None
