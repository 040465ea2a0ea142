"""What the CPU of this machine computes well; importing this module needs no torch."""

from __future__ import annotations

from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})


def multiplies_bfloat16() -> bool | None:
    """Return True if the CPU has instructions for products in bfloat16; None if this system does not say."""
    facts = CPU_FACTS.read_text() if CPU_FACTS.is_file() else ""
    flags = next((line for line in facts.splitlines() if line.startswith("flags")), "").split()
    return not _BFLOAT16.isdisjoint(flags) if flags else None


def resolve_dtype(name: str) -> str:
    """Return the dtype of models on CPUs: for `auto` the one that this CPU is fast in, and any other name as it is."""
    return ("bfloat16" if multiplies_bfloat16() else "float32") if name == "auto" else name
