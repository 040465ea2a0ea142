"""Keep stored objects and the rows that reference them consistent, through intents.

An intent is committed before bytes are written, and removed by the transaction that references the object. A deletion
is an intent of the transaction that drops the reference, and removed when the bytes are gone. Nothing else in the
service deletes an object.
"""

from __future__ import annotations

from app.objects.intents import (
    GivenUp,
    ObjectWriter,
    PlannedObject,
    condemn,
    condemn_prefix,
    discard,
    give_back,
    has_deletions,
    perform,
    probe,
    sweep,
    writing,
)

__all__ = [
    "GivenUp",
    "ObjectWriter",
    "PlannedObject",
    "condemn",
    "condemn_prefix",
    "discard",
    "give_back",
    "has_deletions",
    "perform",
    "probe",
    "sweep",
    "writing",
]
