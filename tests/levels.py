"""Which tests run where: `make test-fast` while one works, `make test` before a merge, `make soak` at night.

`--level fast`  tests without a server, a process of their own or a trained model
`--level test`  each area, without `SLOW` tests; of what is alike in several ways one way
`--level slow`  `SLOW` tests, which continuous integration runs after the others, likewise one way
`--level soak`  what both leave out, by the rows below
no level        all tests of the paths that pytest is given
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import pytest

LEVELS = ("fast", "test", "slow", "soak")

# Beginnings of ids whose tests took more than 1.5 s each, beside other work on two cores: whole services, browsers,
# processes that are killed, packages in new environments, and jobs that train; and two long files of shorter tests.
SLOW = (
    "tests/app/conformance/test_others.py",
    "tests/app/conformance/test_schema.py",
    "tests/app/http/provider/test_any_job.py",
    "tests/app/http/provider/test_other_pages.py",
    "tests/app/http/provider/test_policy_page.py",
    "tests/app/http/test_cli.py",
    "tests/app/http/test_deployed.py",
    "tests/app/http/test_documented_calls.py",
    "tests/app/http/test_fuzz.py",
    "tests/app/http/test_readme_script.py",
    "tests/app/http/test_shutdown.py",
    "tests/app/http/test_writes_at_once.py",
    "tests/app/inference/test_base_model_changed.py",
    "tests/app/inference/test_engine_in_bfloat16.py",
    "tests/app/inference/test_move_in.py",
    "tests/app/inference/test_quantized.py",
    "tests/app/inference/test_released.py",
    "tests/app/move_in/test_kills.py",
    "tests/app/test_detached.py",
    "tests/app/test_embedded.py",
    "tests/app/test_pooler.py",
    "tests/app/test_preflight.py",
    "tests/browser/",
    "tests/faults/test_database.py",
    "tests/faults/test_exact_resume.py",
    "tests/faults/test_frozen.py",
    "tests/faults/test_locked_database.py",
    "tests/faults/test_network.py",
    "tests/faults/test_objects.py",
    "tests/faults/test_outages.py",
    "tests/faults/test_receivers.py",
    "tests/faults/test_service_storm.py",
    "tests/faults/test_storm.py",
    "tests/faults/test_streams.py",
    "tests/faults/test_uploads.py",
    "tests/legacy/",
    "tests/spard/test_adapters.py",
    "tests/spard/test_broken_off.py",
    "tests/spard/test_defenses.py",
    "tests/spard/test_extensions.py",
    "tests/spard/test_mapped_memory.py",
    "tests/spard/test_minimal.py",
    "tests/spard/test_nearest_prompts.py",
    "tests/spard/test_nf4.py",
    "tests/spard/test_origin.py",
    "tests/spard/test_plain_loop.py",
    "tests/spard/test_proof.py",
    "tests/spard/test_ranks_of_unequal_memory.py",
    "tests/spard/test_run.py",
    "tests/spard/test_safe_rows.py",
    "tests/spard/test_tokenized.py",
    "tests/spard/test_transformers_callback.py",
    "tests/spard/test_trl.py",
    "tests/test_agents.py",
    "tests/test_backup.py",
    "tests/test_compatibility.py",
    "tests/test_contributing.py",
    "tests/test_demo.py",
    "tests/test_demo_serving.py",
    "tests/test_mutants.py",
    "tests/test_packages.py",
    "tests/test_production.py",
    "tests/test_servers.py",
    "tests/test_shared_runs.py",
    "tests/test_surroundings.py",
    "tests/test_walk.py",
    "tests/walks/",
    "tests/worker/test_architectures.py",
    "tests/worker/test_audit_engine.py",
    "tests/worker/test_bfloat16.py",
    "tests/worker/test_celery.py",
    "tests/worker/test_checkpoints.py",
    "tests/worker/test_judge_proxy.py",
    "tests/worker/test_ending.py",
    "tests/worker/test_engine.py",
    "tests/worker/test_engine_long_prompts.py",
    "tests/worker/test_engine_turns.py",
    "tests/worker/test_epoch_ends.py",
    "tests/worker/test_faults.py",
    "tests/worker/test_given_up_leases.py",
    "tests/worker/test_gpu.py",
    "tests/worker/test_imports.py",
    "tests/worker/test_judge_outage.py",
    "tests/worker/test_kept_ends.py",
    "tests/worker/test_lineage.py",
    "tests/worker/test_nodes.py",
    "tests/worker/test_one_job.py",
    "tests/worker/test_outages.py",
    "tests/worker/test_pipeline.py",
    "tests/worker/test_quantized.py",
    "tests/worker/test_rank_processes.py",
    "tests/worker/test_read_ahead.py",
    "tests/worker/test_resume.py",
)

# Beginnings of tests' ids that run in the soak alone, and why the others are enough for `make test`.
SOAK: Mapping[str, str] = {
    "tests/legacy/test_half_done.py::test_a_half_done_job_of_an_earlier_commit_is_carried_on[2ef88b63]": (
        "one earlier commit stands for those before 1.0; 4a1ed91d is carried on in `make test`"
    ),
    "tests/legacy/test_side_by_side.py": (
        "two versions at once before 1.0: test_half_done.py has a worker of each, test_goes_on.py the older schema"
    ),
}
# Files whose tests depend on which database it is: locks, threads at once, the order of rows, types, migrations. They
# run on SQLite and PostgreSQL in `make test`; tests of other files run on SQLite there, and on PostgreSQL in the soak.
BOTH_DATABASES = (
    "tests/app/http/test_deployed.py",
    "tests/app/http/test_nul_characters.py",
    "tests/app/http/test_statements.py",
    "tests/app/http/test_writes_at_once.py",
    "tests/app/inference/test_lost_calls.py",
    "tests/app/test_audit_log.py",
    "tests/app/test_db.py",
    "tests/app/test_first_key.py",
    "tests/app/test_handing_back.py",
    "tests/app/test_key_edges.py",
    "tests/app/test_keys.py",
    "tests/app/test_lease.py",
    "tests/app/test_lease_records.py",
    "tests/app/test_lineage.py",
    "tests/app/test_lock_waits.py",
    "tests/app/test_migrations.py",
    "tests/app/test_page_rows.py",
    "tests/app/test_queue.py",
    "tests/app/test_quotas.py",
    "tests/app/test_reaper.py",
    "tests/app/test_removal.py",
    "tests/app/test_transitions.py",
    "tests/app/test_turns.py",
    "tests/app/test_waivers.py",
    "tests/faults/",
    "tests/test_backup.py",
    "tests/worker/test_attempt.py",
    "tests/worker/test_embedding_shards.py",
    "tests/worker/test_faults.py",
)
# Where each color scheme of a page is looked at in `make test`; what a page does is tried in the light one there.
BOTH_COLORS = (
    "tests/browser/test_dashboard.py::test_from_a_key_to_an_adapter",
    "tests/browser/test_job_pages.py::test_a_job_that_fails_the_gate",
    "tests/browser/test_labels.py::test_a_phone_shows_one_reply_at_a_time",
    "tests/browser/test_provider.py::test_pages_are_for_everybody_and_texts_stay_texts",
)
# Beginnings of ids, and fixtures, that `make test-fast` leaves out: a service, a server, a browser or a trained model,
# copies of the repository, and conversations that are drawn for each chat template.
_NOT_FAST = (
    "tests/app/conformance/",
    "tests/app/http/",
    "tests/app/inference/",
    "tests/app/launchers/",
    "tests/app/move_in/",
    "tests/browser/",
    "tests/clients/",
    "tests/faults/",
    "tests/legacy/",
    "tests/spard/test_chat_templates.py::test_drawn_conversations",
    "tests/test_contributing.py",
    "tests/worker/test_node_wires.py",  # starts processes in threads, where a skip is an error
    "tests/worker/test_sinks.py",  # likewise
)
_FIXTURES = frozenset(
    {
        *("browser", "moto_server", "postgres_server", "rclone_server", "redis_server"),
        *("cloud_shop", "finished_job", "finished_run", "light_shop", "shop"),
        *("demo", "lab", "natural"),
        "fake_vllm",
    }
)
_PARAMETERS = frozenset({"moto", "postgres", "rclone"})  # of fixtures that open a server when they are asked


class Test(Protocol):
    """What is asked of a test of pytest."""

    @property
    def nodeid(self) -> str: ...


class Levels:
    """Leaves out the tests of other levels, and keeps those of the fast one from starting processes."""

    def __init__(self, level: str) -> None:
        self._level = level

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Tell pytest which tests are left out, as `-k` does."""
        require_matches(items)
        ids = frozenset(item.nodeid for item in items)
        left_out = [item for item in items if not belongs(item, self._level, ids)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if belongs(item, self._level, ids)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Skip a test of the fast level when it starts a process."""
        if self._level != "fast":
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "__init__", _skip_test)
            patch.setattr(subprocess.Popen, "__del__", lambda self: None)  # of one that never came to be
            patch.setattr(BaseProcess, "start", _skip_test)
            return (yield)


def belongs(item: Any, level: str, ids: Collection[str]) -> bool:
    """Return whether a test, one of those with these ids, runs at a level."""
    is_soak = soak_reason(item.nodeid, parameters(item), ids) != ""
    if level == "soak":
        return is_soak
    is_slow = item.nodeid.startswith(SLOW)
    if level == "slow":
        return is_slow and not is_soak
    return not (is_soak or is_slow) and (level == "test" or _is_fast(item))


def soak_reason(nodeid: str, found: Mapping[str, object], ids: Collection[str]) -> str:
    """Return why a test with these parameters runs in the soak alone; nothing where `make test` runs it.

    `ids` are those of all tests: one that is on PostgreSQL alone, or in the dark alone, is in `make test`.
    """
    for beginning, reason in SOAK.items():
        if nodeid.startswith(beginning):
            return reason
    is_second = (
        "postgres" in (found.get("database_url"), found.get("old")) and nodeid.replace("postgres", "sqlite") in ids
    )
    if is_second and not nodeid.startswith(BOTH_DATABASES):
        return "its SQL is the same on SQLite"
    is_dark = found.get("context") == "dark" and nodeid.replace("dark", "light") in ids
    if is_dark and not nodeid.startswith(BOTH_COLORS):
        return "its page does the same in the light"
    return ""


def require_matches(items: Sequence[Test]) -> None:
    """Raise where a row names no test although tests of its file were collected: it has another name now."""
    ids = [item.nodeid for item in items]
    for beginning in (*SOAK, *SLOW, *BOTH_COLORS, *BOTH_DATABASES):
        file = beginning.partition("::")[0]
        is_whole = "::" in beginning and sum(each.startswith(f"{file}::") for each in ids) > 1
        if is_whole and not any(each.startswith(beginning) for each in ids):
            raise pytest.UsageError(f"tests/levels.py: no test begins with {beginning}")


def parameters(item: Any) -> dict[str, object]:
    """Return the parameters of a test by name, with those of its fixtures."""
    found: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    return found


def _is_fast(item: Any) -> bool:
    values = parameters(item).values()
    named = {each for each in values if isinstance(each, str)}
    opens = _FIXTURES.intersection(item.fixturenames) or _PARAMETERS & named
    return not (opens or item.nodeid.startswith(_NOT_FAST))


def _skip_test(*_: object, **__: object) -> None:
    pytest.skip("starts a process: `make test` runs it")


def register(config: pytest.Config) -> None:
    """Have pytest keep to the level that it is given."""
    level = config.getoption("--level")
    if level == "fast":  # files that were opened for a process which is not started are left to the garbage collector
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")  # in tests
        warnings.filterwarnings("ignore", "unclosed", ResourceWarning)  # and after the last one
    if level is not None:
        config.pluginmanager.register(Levels(level))


def add_option(parser: Any) -> None:
    """Add `--level` to pytest."""
    add: Callable[..., None] = parser.addoption
    add(
        "--level",
        choices=LEVELS,
        help="see tests/levels.py; by default all tests of the paths run",
    )
