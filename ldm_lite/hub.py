"""Where a checkpoint is: a path, a file on the Hugging Face hub, or the bundled model."""

import os
from pathlib import Path

BUNDLED = "emoji.safetensors"
SHORT = {  # names for files that are asked for often
    "taesd": "madebyollin/taesd/diffusion_pytorch_model.safetensors",
    "taesdxl": "madebyollin/taesdxl/diffusion_pytorch_model.safetensors",
}


def bundled() -> Path:
    """The model that comes with the package: inside an installed wheel, or beside the package in a checkout.

    Raises FileNotFoundError if neither is there.
    """
    package = Path(__file__).parent
    for folder in (package / "weights", package.parent / "weights"):
        if (folder / BUNDLED).is_file():
            return folder / BUNDLED
    raise FileNotFoundError(f"the bundled model {BUNDLED} is missing from {package / 'weights'}: reinstall ldm_lite")


def resolve(source: str | os.PathLike[str] | None) -> Path:
    """A checkpoint's name -> its local path.

    None is the bundled model; an existing path is itself; one of SHORT stands for what it says; "owner/repository/file"
    that is no local path is downloaded from the hub, once, into its cache.  Raises FileNotFoundError with what to do.
    """
    if source is None:
        return bundled()
    path = Path(source).expanduser()
    if path.exists():
        return path
    parts = SHORT.get(os.fspath(source), os.fspath(source)).split("/")
    # A path below a folder that is there is a path with a mistake in it, not a name on the hub.
    if len(parts) < 3 or not all(parts) or parts[0] == "~" or Path(parts[0]).is_dir():
        raise FileNotFoundError(
            f"{source}: no such file (wanted a path, or owner/repository/file for one on the Hugging Face hub)"
        )
    import huggingface_hub  # here, not above: it takes a third of a second that local files need not wait for

    try:
        return Path(huggingface_hub.hf_hub_download("/".join(parts[:2]), "/".join(parts[2:])))
    except Exception as error:  # the library raises many kinds, all of them for the reason it gives
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(f"{source}: no such file, and the hub did not give it: {reason}") from error
