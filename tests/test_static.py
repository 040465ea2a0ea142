"""What our code never does: ask a shell, unpickle, evaluate text, run code of a model's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for room in ("app", "spard", "worker", "migrations") for path in (ROOT / room).rglob("*.py"))
CALLS = {
    "os.system",
    "os.popen",
    "eval",
    "exec",
    "torch.load",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "marshal.loads",
}
MODULES = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
DELETING = {"delete", "delete_prefix", "move", "clear_unfinished"}
WRITING = {"write", "upload_file"}
FLAGS = {"shell", "trust_remote_code"}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call() if ast.unparse(node.func) in CALLS:
                yield ast.unparse(node.func)
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)) if name in FLAGS:
                yield f"{name}=True"
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name in MODULES)
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                yield module


SANDBOXED = {"spard/isolation/program.py": ["exec", "exec"]}  # runs what a model wrote, in a sandbox


def test_our_code_asks_no_shell_and_unpickles_nothing() -> None:
    assert len(SOURCES) > 150
    found = {str(path.relative_to(ROOT)): list(faults(ast.parse(path.read_text()))) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == SANDBOXED


def of_storage(tree: ast.AST, methods: set[str]) -> set[str]:
    """The methods of a storage, of those named, that a module calls or hands on."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in methods)
    return {node.attr for node in found if re.search(r"storage$", ast.unparse(node.value))}


def test_objects_are_deleted_by_one_package_and_written_by_it_and_by_workers() -> None:
    """app/objects notes an intent first; what a worker writes is explained by its job's row."""
    found = {
        path.relative_to(ROOT).as_posix(): of_storage(ast.parse(path.read_text()), DELETING | WRITING)
        for path in SOURCES
        if not path.relative_to(ROOT).as_posix().startswith(("app/objects/", "app/storage/"))
    }
    assert {path: names for path, names in found.items() if names} == {
        "worker/results.py": {"upload_file"},
        "worker/child_files.py": {"upload_file"},
    }


@pytest.mark.parametrize("code", ["storage.delete(key)", "later(self._storage.delete_prefix, key)", "storage.write(k)"])
def test_a_call_to_the_storage_would_be_found(code: str) -> None:
    assert of_storage(ast.parse(code), DELETING | WRITING)


@pytest.mark.parametrize(
    "code",
    ["import os\nos.system('a')", "run(a, shell=True)", "import pickle", "from pickle import loads", "torch.load(a)",
     "AutoModel.from_pretrained(a, trust_remote_code=True)", "eval(a)"],
)  # fmt: skip
def test_each_of_them_would_be_found(code: str) -> None:
    assert list(faults(ast.parse(code)))
