"""Mark deleted versions of pools and suites; their rows stay, so that no version number is used twice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.add_column("corpora", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Delete the rows of deleted versions, which older code offers although their bytes are gone."""
    op.execute("DELETE FROM corpora WHERE deleted_at IS NOT NULL")
    op.drop_column("corpora", "deleted_at")
