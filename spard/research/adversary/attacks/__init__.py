"""The attacks, one file each; a file that defines `ATTACK` is found by itself."""

from __future__ import annotations
