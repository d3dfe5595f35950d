"""Find checkpoints: local paths, and files on the Hugging Face hub."""

import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path

log = logging.getLogger("ldm_lite")

ALIASES = {  # short names of common files
    "taesd": "madebyollin/taesd/diffusion_pytorch_model.safetensors",
    "taesdxl": "madebyollin/taesdxl/diffusion_pytorch_model.safetensors",
}
ENDINGS = (".ckpt", ".safetensors", ".sft", ".gguf", ".pt", ".pth", ".bin", ".pt2")  # of files, not of repositories


def resolve(source: str | os.PathLike[str]) -> Path:
    """Return the local path of a checkpoint.

    `source` is a path, one of ALIASES, or "owner/repository/file" on the hub, from which it is downloaded once into
    the hub's cache; then its path is logged.  Raises FileNotFoundError with what to do.
    """
    if not _name(source):
        raise FileNotFoundError("got an empty checkpoint name, expected a path or a name on the Hugging Face hub")
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown user
    if path.exists():
        return path
    parts = ALIASES.get(os.fspath(source), os.fspath(source)).split("/")
    # A path below an existing folder is a mistyped path, not a name on the hub.
    if len(parts) < 3 or not all(parts) or parts[0] == "~" or Path(parts[0]).is_dir():
        raise FileNotFoundError(
            f"{source}: no such file (expected a path, or owner/repository/file on the Hugging Face hub)"
        )
    path = download("/".join(parts[:2]), "/".join(parts[2:]))
    log.info("%s: at %s", source, path)
    return path


def check_there(source: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError if a source is neither a path nor a name on the hub; a file on the hub is downloaded."""
    if repository(source) is None:
        resolve(source)


def repository(source: str | os.PathLike[str]) -> str | None:
    """Return the name "owner/repository" if the source is a whole repository on the hub; else None.

    A name that has a checkpoint's extension or begins with an existing folder is a mistyped path.
    """
    parts = _name(source).split("/")
    names = len(parts) == 2 and all(re.fullmatch(r"\w[\w.-]*", part) for part in parts)
    if not names or parts[1].lower().endswith(ENDINGS) or Path(*parts).exists() or Path(parts[0]).is_dir():
        return None
    return "/".join(parts)


def _name(source: str | os.PathLike[str]) -> str:
    """Return a source as text.  Raises TypeError for anything else."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"got {source!r:.60} as a checkpoint, expected a path or a name on the Hugging Face hub")
    return os.fspath(source)


def title(path: Path) -> str:
    """Return the name of a file or folder; for a repository's folder in the hub's cache, the repository's name."""
    is_snapshot = path.parent.name == "snapshots"  # models--owner--repository/snapshots/commit
    return path.parents[1].name.rpartition("--")[2] if is_snapshot else path.name


def files(repository: str) -> list[str]:
    """Return the file names of a repository; without a network, those in the cache.

    Raises FileNotFoundError with what to do.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        _check_reachable()
        return HfApi().list_repo_files(repository)
    except Exception as error:  # the library raises many kinds
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except Exception:
            message = f"{repository}: no such file or folder, and the hub did not list it: "
            raise FileNotFoundError(message + _reason(error, repository)) from error
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def download(repository: str, file: str, kind: str = "model") -> Path:
    """Download a file of a repository and return its path in the hub's cache, which keeps the repository's folders.

    kind is "model" or "dataset".  Without a network a file in the cache is used.  Raises FileNotFoundError with what
    to do.
    """
    # Imported here: it takes a third of a second, which local files need not wait for.
    from huggingface_hub import hf_hub_download

    try:
        try:
            _check_reachable()
        except OSError as error:
            try:
                return Path(hf_hub_download(repository, file, repo_type=kind, local_files_only=True))
            except Exception:
                raise error from None
        return Path(hf_hub_download(repository, file, repo_type=kind))
    except Exception as error:  # the library raises many kinds
        message = f"{repository}/{file}: no such file, and the download from the hub failed: "
        raise FileNotFoundError(message + _reason(error, repository)) from error


def _check_reachable() -> None:
    """Raises OSError if the hub cannot be reached: the library would say so after five tries, in 40 seconds."""
    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    if not constants.HF_HUB_OFFLINE and address.scheme not in urllib.request.getproxies():
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=10).close()


def _reason(error: Exception, repository: str) -> str:
    """Explain in one line why a download failed: in our words for common errors, otherwise the library's."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return f"accept its licence at {page}, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repository} does not exist, was moved, or is private and needs `hf auth login`"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what kept the library from asking the hub
    if isinstance(error, errors.EntryNotFoundError):
        return f"the repository has no such file; its files are listed at {page}/tree/main"
    if isinstance(error, (ConnectionRefusedError, TimeoutError, socket.gaierror)):
        return f"the hub cannot be reached ({error.strerror or error}): give the path of a file that is here"
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"
