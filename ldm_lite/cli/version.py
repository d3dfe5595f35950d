"""The version of the package, which PNG texts and reports state, and how to install its extras."""

__version__ = "0.1.0"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra: by the package's name if it is installed, else by its folder's path.

    If it is not installed, pip would look the name up in its index, where it may belong to somebody else.
    """
    import importlib.metadata  # slow, and seldom needed
    from pathlib import Path

    try:
        importlib.metadata.version("ldm_lite")
        name = "ldm_lite"
    except importlib.metadata.PackageNotFoundError:
        name = str(Path(__file__).parents[2])
    return f'pip install "{name}[{extra}]"'
