"""Add the row format of training files, which distinguishes preference pairs from conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    op.add_column("files", sa.Column("row_format", sa.String(), nullable=True))


def downgrade() -> None:
    """Older code takes no preference pairs: a job on such a file fails with its reader's error."""
    op.drop_column("files", "row_format")
