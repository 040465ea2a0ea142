"""Add the number of benign rows of a pool; null for suites and for existing pools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0056"
down_revision = "0055"


def upgrade() -> None:
    op.add_column("corpora", sa.Column("benign_rows", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("corpora", "benign_rows")
