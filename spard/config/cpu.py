"""What the CPU of this machine computes well; importing this module needs no torch."""

from __future__ import annotations

from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16"})


def multiplies_bfloat16() -> bool | None:
    """Return True if the CPU has instructions for products in bfloat16; None if this system does not say."""
    flags = _read_fact("flags").split()
    return not _BFLOAT16.isdisjoint(flags) if flags else None


def prefers_onednn() -> bool:
    """Return True if oneDNN's float32 products are faster than MKL's: on AMD's CPUs with AVX-512."""
    return "AuthenticAMD" in _read_fact("vendor_id") and "avx512f" in _read_fact("flags").split()


def _read_fact(name: str) -> str:
    """Return what this system says of its first CPU under a name; empty if it says nothing."""
    facts = CPU_FACTS.read_text() if CPU_FACTS.is_file() else ""
    found = next((line for line in facts.splitlines() if line.startswith(name)), "")
    return found.partition(":")[2]


def resolve_dtype(name: str) -> str:
    """Return the dtype of models on CPUs: for `auto` the one that this CPU is fast in, and any other name as it is."""
    return ("bfloat16" if multiplies_bfloat16() else "float32") if name == "auto" else name
