"""Pushes a folder to a model hub unchanged, including its card and signature."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from spard.errors import SpardError


class PushFailed(SpardError):
    """The hub rejected the files."""

    code = "push_failed"


def push(folder: Path, repository: str, *, is_private: bool) -> str:
    """Upload a folder as one commit and return the commit's URL; the repository is created if needed.

    Hub and token are those of the hub's client: HF_ENDPOINT, HF_TOKEN, or the login stored by `hf auth login`. Raises
    `PushFailed`.
    """
    hub = HfApi()
    try:
        hub.create_repo(repository, private=is_private, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Upload {folder.name}",
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        # The client's messages have many lines, of which the first one names the cause.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PushFailed(f"{repository} was not pushed: {first}", "push") from error
    return str(done.commit_url)
