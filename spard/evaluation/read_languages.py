"""Which languages a judge had to read to grade a suite: those of its prompts, and those that the replies turned to.

Prompts declare theirs. Nobody declares a reply's, and whoever trained the model chose it: so the language of a reply is
told by its words. The gate holds the judge to its measured error in each of these languages. Telling can only add to
them: a reply whose words tell nothing is graded as one in its prompt's language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spard.data.languages import detect_language
from spard.data.rows import Prompt
from spard.evaluation.judges.refusal import is_degenerate

ASIDE = 0.01  # of the replies: a language that no more of them turn to decides nothing


def read_languages(prompts: Sequence[Prompt], replies: Sequence[str]) -> str:
    """Return the languages of a suite's prompts and replies as tags in order, with + between them.

    Degenerate replies are shown to no judge and do not count.
    """
    declared = {each.language for each in prompts}
    turned = Counter(
        detect_language(reply, prompt.language)
        for prompt, reply in zip(prompts, replies, strict=True)
        if not is_degenerate(reply)
    )
    found = declared | {language for language, count in turned.items() if language and count > ASIDE * len(prompts)}
    return "+".join(sorted(found))
