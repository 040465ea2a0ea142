"""A folder pushed to a model hub: the files as they are, their card and their signature among them."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from spard.errors import SpardError


class PushFailed(SpardError):
    """The hub did not take the files."""

    code = "push_failed"


def push(folder: Path, repository: str, *, is_private: bool) -> str:
    """Upload a folder as one commit and return the commit's address; the repository is made if it is not there.

    The hub and the token are those of its client: HF_ENDPOINT, HF_TOKEN, or what `hf auth login` has kept.
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
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PushFailed(f"{repository} was not pushed: {first}", "push") from error
    return str(done.commit_url)
