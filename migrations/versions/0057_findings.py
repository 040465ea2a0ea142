"""Add findings of a file: each problem once, with the number of affected rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0057"
down_revision = "0056"


def upgrade() -> None:
    op.add_column("files", sa.Column("findings", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("files", "findings")
