"""Digest: of a base model's files as they were when the provider offered it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0058"
down_revision = "0057"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("digest", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("base_models", "digest")
