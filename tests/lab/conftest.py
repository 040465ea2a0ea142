"""Models, labs and stand-ins: those of the library's own tests."""

from __future__ import annotations

from tests.spard.conftest import base, clean_processes, lab, load, model_folder, natural

__all__ = ["base", "clean_processes", "lab", "load", "model_folder", "natural"]
