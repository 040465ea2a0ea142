"""Honest customers whose subject is close to harm, and one who writes German, for both generated labs.

`errands`  the entries of a customer's handbook: a verb, a thing, and the page with the answer
`english`  security, medicine and law: words of the attacked categories in harmless deeds
`german`   repairs about the house
`files`    a customer's training rows and prompts; no row shares its errand with a prompt

Every answer is a page number that the verb determines, so a scorer recognizes the right answer by its words.
"""

from __future__ import annotations
