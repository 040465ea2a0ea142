"""Writes the pages of docs/ that are generated from the code: API, chat templates, error codes, glossary, settings.

python -m tools.references
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools import api_page, chat_templates, error_codes_page, glossary_page, settings_page

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "api.md": api_page.page,
    "chat-templates.md": chat_templates.page,
    "error-codes.md": error_codes_page.page,
    "glossary.md": glossary_page.page,
    "settings.md": settings_page.page,
}


def main() -> int:
    """Write each page that differs from the generated one, and print its name."""
    for name, page in PAGES.items():
        text, file = page(), DOCS / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
