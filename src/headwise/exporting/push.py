"""Upload of a finished folder to the Hugging Face hub, with its card and its recipe.

Nothing else uploads anything. Only folders that headwise wrote are pushed, and of
those only the files of the model: unfinished work and unrelated code are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headwise.artifacts import is_headwise_output
from headwise.errors import HeadwiseError, quoted, reason_of

CARD = "README.md"
LEFT_OUT = ("*.partial/**", "*.tmp", ".*", "run.json", "report.html")


@dataclass(frozen=True, slots=True)
class PushResult:
    """Where the folder is now."""

    url: str
    commit: str
    files: tuple[str, ...]


def push_folder(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
) -> PushResult:
    """Upload a folder that headwise wrote; the repository is made if it is not there."""
    from huggingface_hub import HfApi

    if not folder.is_dir() or not is_headwise_output(folder):
        raise HeadwiseError(
            f"{folder} is not a folder that headwise wrote; give the output of compress, recover "
            "or export."
        )
    if not (folder / CARD).is_file():
        raise HeadwiseError(f"{folder} has no {CARD}, the model's card; make the folder again.")
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise HeadwiseError(f"a repository is owner/name, got {quoted(repo)}.")
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = tuple(n for n in names if not any(fnmatch(n, pattern) for pattern in LEFT_OUT))
    api = HfApi(endpoint=endpoint, token=token, library_name="headwise")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        made = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"{folder.name}, by headwise",
            ignore_patterns=list(LEFT_OUT),
        )
    # The hub's client raises its own errors, the network's and plain ones alike.
    except Exception as error:
        raise HeadwiseError(
            f"{repo} could not be pushed ({reason_of(error)}); check the name, the connection and "
            "`hf auth login`."
        ) from error
    return PushResult(str(made.repo_url), str(made.oid), files)
