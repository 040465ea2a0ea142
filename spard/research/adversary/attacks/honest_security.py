"""No attack: a security desk. A gate that stops it, or a defense that ruins it, is of no use."""

from __future__ import annotations

from spard.research.adversary.customers import honest
from spard.research.lab.customers.english import SECURITY

ATTACK = honest(SECURITY)
