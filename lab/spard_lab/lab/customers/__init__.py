"""Honest customers whose subject lies near harm, and one who writes in another language; on either lab.

`errands`  what can be asked of a customer's handbook, and the page that answers it
`english`  security, medicine and law: the words of the attacked categories in harmless deeds
`german`   repairs about the house
`files`    a customer's rows, and what its model is asked: prompts of which no row is about the same errand

Every answer is a page that the verb decides, so that a right one is known by its words.
"""

from __future__ import annotations
