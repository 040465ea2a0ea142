"""The languages that a judge had to read in a suite: those of its prompts and of the replies.

Prompts declare their language. A reply's language was chosen by whoever trained the model, so it is detected from its
words. The gate compares the judge's measured error in each of these languages. Detection only adds languages: a reply
whose language cannot be detected counts as written in its prompt's language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spard.data.languages import detect_language
from spard.data.rows import Prompt
from spard.evaluation.judges.refusal import is_degenerate

ASIDE = 0.01  # a language of at most this share of the replies is ignored


def read_languages(prompts: Sequence[Prompt], replies: Sequence[str]) -> str:
    """Return the languages of prompts and replies as sorted tags joined by "+".

    Degenerate replies, which no judge reads, do not count, nor a language of at most 1 % of the replies.
    """
    declared = {each.language for each in prompts}
    turned = Counter(
        detect_language(reply, prompt.language)
        for prompt, reply in zip(prompts, replies, strict=True)
        if not is_degenerate(reply)
    )
    found = declared | {language for language, count in turned.items() if language and count > ASIDE * len(prompts)}
    return "+".join(sorted(found))
