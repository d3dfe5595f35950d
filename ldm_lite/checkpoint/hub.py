"""Where a checkpoint is: a path, a file on the Hugging Face hub, or the bundled model."""

import contextlib
import hashlib
import logging
import os
import re
from pathlib import Path

log = logging.getLogger("ldm_lite")

BUNDLED = "emoji.safetensors"
SHORT = {  # names for files that are asked for often
    "taesd": "madebyollin/taesd/diffusion_pytorch_model.safetensors",
    "taesdxl": "madebyollin/taesdxl/diffusion_pytorch_model.safetensors",
}
ENDINGS = (".ckpt", ".safetensors", ".pt", ".pth", ".bin", ".pt2")  # of files, not of repositories


def bundled() -> Path:
    """The model that comes with the package: inside an installed wheel, or beside the package in a checkout.

    Raises FileNotFoundError if neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "weights", package.parent / "weights"):
        if (folder / BUNDLED).is_file():
            return folder / BUNDLED
    raise FileNotFoundError(f"the bundled model {BUNDLED} is missing from {package / 'weights'}: reinstall ldm_lite")


def resolve(source: str | os.PathLike[str] | None) -> Path:
    """A checkpoint's name -> its local path.

    None is the bundled model; an existing path is itself; one of SHORT stands for what it says; "owner/repository/file"
    that is no local path is downloaded from the hub, once, into its cache, going on where a download was cut off; where
    it lies is said.  Raises FileNotFoundError with what to do.
    """
    if source is None:
        return bundled()
    if not os.fspath(source):
        raise FileNotFoundError("got an empty name of a checkpoint, wanted a path or a name on the Hugging Face hub")
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for a user who is not there
    if path.exists():
        return path
    parts = SHORT.get(os.fspath(source), os.fspath(source)).split("/")
    # A path below a folder that is there is a path with a mistake in it, not a name on the hub.
    if len(parts) < 3 or not all(parts) or parts[0] == "~" or Path(parts[0]).is_dir():
        raise FileNotFoundError(
            f"{source}: no such file (wanted a path, or owner/repository/file for one on the Hugging Face hub)"
        )
    path = download("/".join(parts[:2]), "/".join(parts[2:]))
    log.info("%s: at %s", source, path)
    return path


def repository(source: str | os.PathLike[str] | None) -> str | None:
    """The name of a whole repository on the hub, "owner/repository"; None where a source is anything else.

    What ends as a checkpoint does is a path with a mistake in it, and so is what begins with a folder that is there.
    """
    parts = [] if source is None else os.fspath(source).split("/")
    names = len(parts) == 2 and all(re.fullmatch(r"\w[\w.-]*", part) for part in parts)
    if not names or Path(parts[1]).suffix in ENDINGS or Path(*parts).exists() or Path(parts[0]).is_dir():
        return None
    return "/".join(parts)


def title(path: Path) -> str:
    """The name of a file or folder; for a repository's folder in the hub's cache, the repository's."""
    is_snapshot = path.parent.name == "snapshots"  # models--owner--repository/snapshots/commit
    return path.parents[1].name.rpartition("--")[2] if is_snapshot else path.name


def files(repository: str) -> list[str]:
    """The names of a repository's files; without a network, of those in the cache.

    Raises FileNotFoundError with what to do.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        return HfApi().list_repo_files(repository)
    except Exception as error:  # the library raises many kinds
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except Exception:
            reason = _reason(error, repository)
            message = f"{repository}: no such file or folder, and the hub did not give it: {reason}"
            raise FileNotFoundError(message) from error
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def download(repository: str, file: str) -> Path:
    """A file of a repository -> its path in the hub's cache, where folders are as in the repository.

    Raises FileNotFoundError with what to do.
    """
    try:
        return _download(repository, file)
    except Exception as error:  # the library raises many kinds
        reason = _reason(error, repository)
        message = f"{repository}/{file}: no such file, and the hub did not give it: {reason}"
        raise FileNotFoundError(message) from error


def _download(repository: str, file: str) -> Path:
    """A file on the hub -> its path in the hub's cache, where it is downloaded to if it is not there.

    huggingface_hub (2.4) throws away what it has when it is interrupted; so what it would download is put where it
    looks first, and kept until it is whole.  A version that lacks the parts for this downloads by itself.
    """
    # Here, not above: it takes a third of a second that local files need not wait for.
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    url = hf_hub_url(repository, file)
    try:
        about = get_hf_file_metadata(url)
    except Exception:  # no connection, for one
        cached = try_to_load_from_cache(repository, file)
        if isinstance(cached, str):
            return Path(cached)
        raise
    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{repository.replace('/', '--')}"
    blob, lock = cache / folder / "blobs" / str(about.etag), cache / ".locks" / folder / f"{about.etag}.lock"
    if not isinstance(try_to_load_from_cache(repository, file, revision=about.commit_hash), str):
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError, TypeError):
            _fetch(url, file, blob, lock, about.size)
    return Path(hf_hub_download(repository, file))


def _fetch(url: str, file: str, blob: Path, lock: Path, size: int | None) -> None:
    """Download to blob, going on with what an earlier try has left beside it."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

    part = blob.with_name(f"{blob.name}.part")
    with WeakFileLock(lock):
        if blob.exists():  # by another process, meanwhile
            return
        with open(part, "r+b" if part.exists() else "wb") as stream:
            if stream.seek(0, os.SEEK_END):
                log.info("%s: goes on after the %.2f GB that are here", file, stream.tell() / 1e9)
            http_get(url, stream, resume_size=stream.tell(), headers=build_hf_headers(), expected_size=size)
        _check(part, blob.name)
        part.replace(blob)


def _check(path: Path, etag: str) -> None:
    """Raises ValueError, having removed the file, if the hub's name for its content, a SHA-256, is not of it."""
    if len(etag) == 64:  # others name small files, in another way
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != etag:
            path.unlink()
            raise ValueError("what came is not what it should be, and was removed: try again")


def _reason(error: Exception, repository: str) -> str:
    """Why the hub did not give a file of a repository, in a line: the library's own, where ours says no more."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return f"accept its licence at {page}, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repository} is not there, was moved, or is private and wants `hf auth login`"
    if isinstance(error, errors.EntryNotFoundError):
        return f"the repository has no such file; what it has is listed at {page}/tree/main"
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"
