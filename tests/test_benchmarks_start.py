"""Every benchmark starts, and names of our modules that stand in its strings and assignments exist."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import training
from tests.spard.parts import write_model

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "tools", "examples", "lab/spard_lab")
OWN = ("app", "spard", "worker", "tests", "benchmarks", "tools", "examples", "spard_lab", "migrations")
TAKES_A_PATH = ("import_module", "find_spec", "run_module", "patch", "setattr")
TAKES_A_NAME = ("getattr", "setattr", "delattr", "hasattr", "object")  # `patch.object`, of unittest


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_benchmark_prints_its_help(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"benchmarks.{path.stem}")
    if "ArgumentParser(" not in path.read_text():  # one without options would begin to measure
        return
    monkeypatch.setattr(sys, "argv", [path.stem, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code in (None, 0)
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_that_no_type_checker_sees_exist(folder: str) -> None:
    missing = [f"{path}: {name}" for path in (ROOT / folder).rglob("*.py") for name in names(path) if not exists(name)]
    assert missing == []


def names(path: Path) -> Iterator[str]:
    """Yield the dotted names of our modules' attributes in strings, patches and assignments of a file."""
    tree = ast.parse(path.read_text())
    modules = dict(imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and callee(node) in TAKES_A_PATH:
            yield from filter(is_dotted, texts(node.args[:1]))
        if isinstance(node, ast.List) and "-m" in (words := texts(node.elts)):
            yield from filter(is_dotted, words[words.index("-m") + 1 :][:1])
        if isinstance(node, ast.Attribute) and (module := module_name(node.value, modules)):
            yield f"{module}.{node.attr}"
        if isinstance(node, ast.Call) and len(node.args) > 1 and callee(node) in TAKES_A_NAME:
            module, name = module_name(node.args[0], modules), node.args[1]
            if module and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield f"{module}.{name.value}"


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local name and the full name of each module of ours that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OWN:
            for each in node.names:
                if is_module(full := f"{node.module}.{each.name}"):
                    yield each.asname or each.name, full


def module_name(node: ast.expr, modules: dict[str, str]) -> str | None:
    """Return the module of ours that an expression is: a name, or a call of `import_module`."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Call) and callee(node) == "import_module" and isinstance(node.args[0], ast.Constant):
        name = str(node.args[0].value)
        return name if name.split(".")[0] in OWN else None
    return None


def callee(node: ast.Call) -> str | None:
    return getattr(node.func, "attr", None) or getattr(node.func, "id", None)


def texts(nodes: Iterable[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def is_dotted(text: str) -> bool:
    """Return True for text such as `app.main`."""
    parts = text.split(".")
    return len(parts) > 1 and parts[0] in OWN and all(part.isidentifier() for part in parts)


def is_module(name: str) -> bool:
    path = name.replace(".", "/")
    return any((ROOT / at / f"{path}{end}").exists() for at in ("", "lab") for end in (".py", "/__init__.py"))


def exists(name: str) -> bool:
    """Return True if a dotted name is a module of ours, or an attribute in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if is_module(".".join(parts[:count])):
            found: object = import_module(".".join(parts[:count]))
            for part in parts[count:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return (ROOT / name.replace(".", "/")).is_dir()


def test_the_arm_in_one_piece_has_more_padding_than_ours(tmp_path: Path) -> None:
    rows, model = training.write_rows(tmp_path / "rows.jsonl", 16, 0), write_model(tmp_path / "model")
    ours, whole = (training._ours(arm, model, rows, 16) for arm in ("ours", "one piece"))
    assert whole["padding"] > ours["padding"] >= 0
