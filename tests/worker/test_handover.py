"""A child that leaves links, pipes and places outside its folder gets nothing of the worker's read or published."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.db.tables.job_records import ResumeState
from app.storage import Storage
from worker.child_files import UnsafeResult, copy, require_plain, upload
from worker.results import CheckpointArchives, Keeper
from worker.workdir import Folder, new_folder

SECRET = b"the provider's signing key"
KEY = "tenants/org-1/jobs/ftjob-1/a1/stage/found.json"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "found.json"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    (path / "stage" / "inner").mkdir(parents=True)
    (path / "stage" / "inner" / "found.json").write_bytes(b"{}")
    return path


def link(root: Path, secret: Path) -> str:
    (root / "stage" / "found.json").symlink_to(secret)
    return "stage/found.json"


def link_to_folder(root: Path, secret: Path) -> str:
    (root / "linked").symlink_to(secret.parent)
    return "linked/found.json"


def parent(root: Path, secret: Path) -> str:
    return f"../{secret.parent.name}/found.json"


def absolute(root: Path, secret: Path) -> str:
    return str(secret)


def pipe(root: Path, secret: Path) -> str:
    os.mkfifo(root / "stage" / "found.json")
    return "stage/found.json"


def folder(root: Path, secret: Path) -> str:
    return "stage/inner"


Trick = Callable[[Path, Path], str]


@pytest.mark.parametrize("trick", [link, link_to_folder, parent, absolute, pipe, folder])
def test_what_is_no_plain_file_of_the_child_s_is_not_uploaded(
    trick: Trick, root: Path, secret: Path, storage: Storage
) -> None:
    below = trick(root, secret)

    with pytest.raises(UnsafeResult):
        upload(storage, KEY, root, PurePosixPath(below))
    assert not storage.exists(KEY)


def test_a_plain_file_is_uploaded(root: Path, storage: Storage) -> None:
    upload(storage, KEY, root, PurePosixPath("stage/inner/found.json"))

    assert b"".join(storage.chunks(KEY)) == b"{}"


def test_a_file_that_is_gone_is_missing(root: Path, storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        upload(storage, KEY, root, PurePosixPath("stage/none.json"))


def test_plain_files_are_copied_with_their_folders(root: Path, tmp_path: Path) -> None:
    copy(root, PurePosixPath("stage"), tmp_path / "to")

    assert (tmp_path / "to" / "inner" / "found.json").read_bytes() == b"{}"


@pytest.mark.parametrize("trick", [link, pipe])
def test_a_folder_with_anything_else_is_neither_copied_nor_taken(
    trick: Trick, root: Path, secret: Path, tmp_path: Path
) -> None:
    trick(root, secret)

    with pytest.raises(UnsafeResult):
        copy(root, PurePosixPath("stage"), tmp_path / "to")
    with pytest.raises(UnsafeResult):
        require_plain(root)


def test_a_folder_that_is_a_link_is_not_taken(root: Path, secret: Path) -> None:
    (root / "out").symlink_to(secret.parent)

    with pytest.raises(UnsafeResult):
        require_plain(root / "out")


def test_plain_folders_are_taken(root: Path) -> None:
    require_plain(root)


def keeper(folder: Folder, storage: Storage) -> Keeper:
    record: ResumeState = {"step": None, "files": []}
    return Keeper(storage, "tenants/org-1/jobs/ftjob-1/a1", folder, record, lambda keys: None)


def test_stages_and_resume_states_are_not_read_through_links(tmp_path: Path, secret: Path, storage: Storage) -> None:
    with new_folder(tmp_path / "work", "job") as folder:
        (folder.resume_states / "step-000001").symlink_to(secret.parent)
        with pytest.raises(UnsafeResult):
            keeper(folder, storage).keep_state(1, folder.resume_states / "step-000001")
        with pytest.raises(UnsafeResult):
            keeper(folder, storage).keep_state(1, folder.root / ".." / ".." / "secrets")
        (folder.stage / "found.json").symlink_to(secret)
        with pytest.raises(UnsafeResult):
            keeper(folder, storage).keep_stages()


def test_a_checkpoint_is_not_packed_through_links(tmp_path: Path, secret: Path, storage: Storage) -> None:
    with new_folder(tmp_path / "work", "job") as folder:
        adapter = folder.epochs / "step-000001" / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").symlink_to(secret)
        archives = CheckpointArchives(
            storage, "ftjob-1", "tenants/org-1/jobs/ftjob-1/a1", folder, Ed25519PrivateKey.generate()
        )
        with pytest.raises(UnsafeResult):
            archives.upload(1)
