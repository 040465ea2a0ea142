"""tests/stable_names.toml against the code: each name that docs/compatibility.md promises to keep is still there.

Adding a name to the code breaks nothing here; removing or renaming one of the file does. Where a name is kept by an
alias, say so on the page and teach the check below to find the alias.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from app.errors import AppError
from app.main import create_app
from app.settings import Settings
from tests.legacy.running import SPARD, Home
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[1]
STABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("stable_names.toml").read_text(encoding="utf-8"))
VARIABLES: dict[str, Any] = tomllib.loads((ROOT / "tools" / "settings.toml").read_text(encoding="utf-8"))
PACKAGES = ("app", "worker", "spard")
OTHER_PROGRAMS = (
    "spard convert",
    "spard lab make",
    "spard lab abilities",
    "spard audit",
    "spard bench methods",
    "spard bench adversary",
    "python -m spard",
)  # they load torch

DEFENSES = ("Spard", "NoDefense", "Ptst", "SafeInstr", "Lisa", "SafeGrad", "SafeLora")


@cache
def literals() -> frozenset[str]:
    """Every text that stands in our sources, pieces of f-strings among them."""
    return frozenset(
        node.value
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def stands(name: str) -> bool:
    """Whether the sources have this text, whole or, as in f"{kind}_format", in two pieces."""
    pieces = ((name[:i], name[i:]) for i, char in enumerate(name) if char in "_." and 0 < i < len(name) - 2)
    return name in literals() or any(a in literals() and b in literals() for a, b in pieces)


def _trees() -> Iterator[ast.Module]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def openapi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("data")))
    document: dict[str, Any] = app.openapi()
    app.state.engine.dispose()
    return document


def test_the_tables_are_found() -> None:
    assert len(VARIABLES["service"]) > 40
    assert len(STABLE["commands"]) > 25
    assert len(STABLE["error_codes"]) > 80


def test_settings_and_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each documented variable is read, and setting it to its documented default changes nothing."""
    documented = {name: variable.get("default") for name, variable in VARIABLES["service"].items()}
    for name in documented:
        monkeypatch.delenv(name, raising=False)
    plain = Settings()
    for name, default in documented.items():
        assert (_value(plain, name) is None) == (default is None), name
        if default is not None:
            monkeypatch.setenv(name, default)
    assert Settings() == plain


def _value(settings: Settings, variable: str) -> Any:
    """What a variable sets: a field, or one of the judge's, of the audit engine's or of the gate's."""
    field = variable.removeprefix("SPARD_").lower()
    group = next((each for each in ("judge", "audit_engine", "gate") if field.startswith(each)), None)
    if group is None or (field in Settings.model_fields and field != group):
        return getattr(settings, field)
    return getattr(getattr(settings, group), field.removeprefix(group).removeprefix("_") or "name")


@pytest.mark.parametrize("variable", [name for row in VARIABLES["others"] for name in row["names"]])
def test_variables_of_other_programs(variable: str) -> None:
    demo = (ROOT / "examples" / "demo.py").read_text(encoding="utf-8")
    assert variable in literals() or f'"{variable}"' in demo


@pytest.mark.parametrize(("command", "options"), STABLE["commands"].items(), ids=STABLE["commands"])
def test_commands_and_their_options(
    command: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    code: str | int
    monkeypatch.setenv("COLUMNS", "250")
    if command in OTHER_PROGRAMS:
        program = [sys.executable, "-m", "spard"] if command.startswith("python") else [SPARD, *command.split()[1:]]
        helped = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False, cwd=tmp_path)
        code, text = str(helped.returncode), helped.stdout
    else:
        monkeypatch.setattr(sys, "argv", [*command.split(), "--help"])
        with pytest.raises(SystemExit) as ended:
            _spard()()
        code, text = str(ended.value.code or 0), capsys.readouterr().out
    assert code == "0"
    assert [option for option in options if not re.search(rf"{option}(?![\w-])", text)] == []


def _spard() -> Any:
    """The command as it is installed."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="spard")
    return entry.load()


def test_ways_to_start_the_parts() -> None:
    assert callable(importlib.import_module("app.main").checked_app)
    assert importlib.util.find_spec("worker.__main__")
    assert importlib.util.find_spec("worker.celery_app")


def test_what_goes_over_the_broker() -> None:
    assert {"worker.wake", "spard:"} <= literals()
    assert STABLE["broker"] == {"task": "worker.wake", "key_prefix": "spard:", "queue": "celery"}


@pytest.mark.parametrize(("module", "names"), STABLE["imports"].items(), ids=STABLE["imports"])
def test_names_that_can_be_imported(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []


@pytest.mark.parametrize("row", STABLE["old_imports"], ids=lambda row: row["module"])
def test_old_imports_work_with_a_warning(row: dict[str, Any]) -> None:
    old, new = row["module"], row["new"]
    if not new.startswith(f"{old}."):  # else the old module is the new one's package
        sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=re.escape(old)):
        found = _members(old, row["names"])
    assert found == _members(new, row["names"])


def _members(module: str, members: list[str]) -> list[Any]:
    return [getattr(importlib.import_module(module), member) for member in members]


def test_old_keys_of_a_recipe_work_with_a_warning(tmp_path: Path) -> None:
    assert list(STABLE["old_recipe_keys"]) == ["anchor_weight"]
    recipe = tmp_path / "recipe.toml"
    for defense, place in (("spard", "defense.anchor_weight"), ("lisa", "anchor")):
        text = (
            'model = "m"\ntraining_file = "t"\npool = "p"\n[recipe]\nanchor_weight = 7\n[recipe.defense]\ntype = "{}"\n'
        )
        recipe.write_text(text.format(defense))
        with pytest.warns(FutureWarning, match="anchor_weight"):
            found: Any = importlib.import_module("spard.config.run_spec").load_recipe(recipe).recipe
        for part in place.split("."):
            found = getattr(found, part)
        assert found == 7


def test_routes(openapi: dict[str, Any]) -> None:
    documented = {(method.lower(), path) for path, methods in STABLE["routes"].items() for method in methods}
    assert documented - {(method, path) for path, methods in openapi["paths"].items() for method in methods} == set()


def test_scopes_and_types_of_webhooks(openapi: dict[str, Any]) -> None:
    known = set(_enum_values(openapi))
    events = STABLE["statuses"]["type of a webhook"]
    assert {*STABLE["scopes"]["names"], *events} - known == set()


def _enum_values(value: Any) -> Iterator[str]:
    """Every value that the OpenAPI document lists for a text."""
    if isinstance(value, dict):
        yield from (each for each in value.get("enum", []) if isinstance(each, str))
        for each in value.values():
            yield from _enum_values(each)
    elif isinstance(value, list):
        for each in value:
            yield from _enum_values(each)


@pytest.mark.parametrize("section", ["job_codes", "row_codes", "metrics_csv", "statuses"])
def test_codes_columns_and_statuses(section: str) -> None:
    found = [name for names in STABLE[section].values() for name in names]
    assert found
    assert [name for name in found if not stands(name)] == []


def test_error_codes_have_their_status() -> None:
    documented = {(code, status) for code, statuses in STABLE["error_codes"].items() for status in statuses}
    elsewhere = {(code, 400) for code in ("too_long", "invalid_value", "invalid_json")}  # pydantic's, translated
    elsewhere |= {("base_unaligned_missing", 400)}  # made of the name of a defense's setting
    assert all(stands(code) for code, _ in documented)
    assert documented - set(_raised_codes()) - elsewhere == set()


def _raised_codes() -> Iterator[tuple[str, int]]:
    """Each code with the status of the errors that are raised with it."""
    kinds = {kind.__name__: kind for kind in _subclasses(AppError)}
    for kind in kinds.values():
        yield kind.code or "", kind.status
    yield "server_error", 500
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from _call_codes(node, kinds)


def _call_codes(call: ast.Call, kinds: dict[str, type[AppError]]) -> Iterator[tuple[str, int]]:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    given = {each.arg: each.value for each in call.keywords}
    if name == "Slots" and isinstance(call.args[1], ast.Constant):
        yield str(call.args[1].value), 429
    if name in kinds and "code" in given:
        asked = given.get("status")
        status = asked.value if isinstance(asked, ast.Constant) else kinds[name].status
        for each in ast.walk(given["code"]):
            if isinstance(each, ast.Constant):
                yield str(each.value), int(str(status))
    elif name == "Refusal" and isinstance(call.args[0], ast.Constant):  # raised by validators of request bodies
        yield str(call.args[0].value), 400


def _subclasses(kind: type[AppError]) -> Iterator[type[AppError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)


def test_prometheus_metrics(tmp_path: Path) -> None:
    port = free_port()
    with Home(tmp_path, {"SPARD_METRICS_PORT": str(port)}).serving(worker=True) as service:
        service.wait_until(lambda: _is_answered(f"http://127.0.0.1:{port}/metrics"))
        texts = {"api": f"{service.url}/metrics", "worker": f"http://127.0.0.1:{port}/metrics"}
        found = {part: httpx2.get(url).text for part, url in texts.items()}
    for part, metrics in STABLE["metrics"].items():
        for name in metrics:
            assert re.search(rf"^# TYPE {name} ", found[part], re.MULTILINE), name
    assert re.search(
        r'^spard_http_requests_total\{method="GET",route="/readyz",status="\d+"\} ', found["api"], re.MULTILINE
    )
    assert 'spard_jobs{status="queued"} 0' in found["api"]


def _is_answered(url: str) -> bool:
    try:
        return bool(httpx2.get(url).is_success)
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize(("table", "keys"), STABLE["recipe"].items(), ids=STABLE["recipe"])
def test_keys_of_a_recipe(table: str, keys: list[str]) -> None:
    """The dataclasses that can be imported are the schema."""
    assert set(keys) - {each.name for each in fields(_dataclass(table))} == set()


def _dataclass(table_name: str) -> Any:
    config, recipe = importlib.import_module("spard.config"), importlib.import_module("spard.config.run_spec")
    if ":" in table_name:
        kinds = (
            getattr(config, name)
            for name in ("Spard", "NoDefense", "Ptst", "SafeInstr", "Lisa", "SafeGrad", "SafeLora")
        )
        return next(kind for kind in kinds if kind().type == table_name.partition(":")[2])
    return {
        "(top)": recipe.RunSpec,
        "suites": recipe.SuiteSpec,
        "recipe": config.Recipe,
        "recipe.selection": config.Selection,
        "recipe.anchors": config.Anchors,
        "recipe.lora": config.Lora,
        "recipe.hyperparameters": config.Hyperparameters,
        "recipe.audit": config.Audit,
        "recipe.dpo": config.Dpo,
        "recipe.ending": config.Ending,
        "judge": config.JudgeSpec,
        "thresholds": config.GateThresholds,
        "row_signal": config.RowSignal,
        "audit_engine": config.AuditEngine,
    }[table_name]


_POOLS = [{"name": "full", "path": "pool.jsonl"}]
_SUITES = [{"name": "kind", "kind": "benign", "path": "benign.jsonl", "language": "de"}]
_DEFENSES = [{"name": "spard", "defense": {"type": "spard", "tau": 0.2}}]
_SHARED = {"pools": _POOLS, "recipe": {"seed": 1}, "defenses": _DEFENSES, "judge": {"name": "refusal"}}
_NATURAL = {"size": "5m", "base_seed": 1, "task": "problems", "texts": ".", "cores": 1}
BENCH_FILES: dict[str, dict[str, Any]] = {
    "lab": {"type": "lab", "natural": _NATURAL, "attacks": ["poisoned"], **_SHARED},
    "files": {
        "type": "files",
        "model": "no-such-folder",
        "revision": "0" * 40,
        "base_unaligned": "no-such-folder",
        "task": "task.jsonl",
        "attacks": [{"name": "a", "rows": "a.jsonl", "suite": "s.jsonl", "dev_suite": "d.jsonl"}],
        "suites": _SUITES,
        "dev_suites": _SUITES,
        "harmful_ratio": 0.1,
        **_SHARED,
    },
}


@pytest.mark.parametrize("kind", BENCH_FILES)
def test_keys_of_a_bench_file(kind: str, tmp_path: Path) -> None:
    """A file with every key is understood; what it names need not be there."""
    (tmp_path / "bench.yaml").write_text(yaml.safe_dump(BENCH_FILES[kind]))
    command = [SPARD, "bench", "methods", "--recipe", "bench.yaml", "--out", "out", "--check"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "error:" not in checked.stderr, checked.stderr
    assert checked.stdout


def test_the_bench_files_have_every_key() -> None:
    documented = {table: set(keys) for table, keys in STABLE["bench"].items()}
    for kind, file in BENCH_FILES.items():
        assert set(file) == documented[kind]
    assert set(BENCH_FILES["files"]["attacks"][0]) == documented["attacks"]
    assert set(_POOLS[0]) == documented["pools"]
    assert set(_SUITES[0]) == documented["suites"]
    assert set(_DEFENSES[0]) == documented["defenses"]


def test_keys_of_stored_documents() -> None:
    found = [name for names in STABLE["documents"].values() for name in names]
    assert [name for name in found if not stands(name) and name not in _names_in_sources()] == []


@cache
def _names_in_sources() -> frozenset[str]:
    """Names of fields: columns, and what `asdict` writes."""
    return frozenset(
        node.target.id
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )
