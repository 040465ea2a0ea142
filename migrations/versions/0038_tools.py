"""Add which parts of tool use a base model's template renders, and the first line of a file with tools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0035"


def upgrade() -> None:
    op.add_column("base_models", sa.Column("tool_support", sa.JSON(), nullable=True))
    op.add_column("files", sa.Column("tool_lines", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("files", "tool_lines")
    op.drop_column("base_models", "tool_support")
