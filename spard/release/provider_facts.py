"""Facts on an exported model that only its provider knows, because no manifest has them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime


def export_time() -> datetime:
    """Return the time to write into documents: now, or `SOURCE_DATE_EPOCH`, which makes equal exports equal bytes.

    See https://reproducible-builds.org/specs/source-date-epoch/.
    """
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    return datetime.fromtimestamp(int(fixed), UTC) if fixed else datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """Facts for the documents of an export; a fact that is None appears there as not stated.

    author           who makes the documents: a person or an organization
    supplier         who gives the model to others; None: the author
    license          of the trained model, an SPDX expression or a name
    base_license     of the base model; None: the one that its model card names
    data_supplier    who brought the training rows
    data_license     of the training rows, and of the rows that validated them
    pool_license     of the safety pool
    base_operations  floating-point operations of the base model's own training, as its provider states them
    written_at       the time of the documents
    """

    author: str | None = None
    supplier: str | None = None
    license: str | None = None
    base_license: str | None = None
    data_supplier: str | None = None
    data_license: str | None = None
    pool_license: str | None = None
    base_operations: float | None = None
    written_at: datetime = field(default_factory=export_time)

    @property
    def supplier_name(self) -> str | None:
        """The supplier, or the author if no supplier is named."""
        return self.supplier or self.author
