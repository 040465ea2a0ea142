"""How many rows of a pool are benign; null of suites, and of pools that were imported before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0056"
down_revision = "0055"


def upgrade() -> None:
    op.add_column("corpora", sa.Column("benign_rows", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("corpora", "benign_rows")
