"""The version of the package, which PNG texts and reports state, and how to install what it needs more."""

__version__ = "0.1.0"


def pip_install(extra: str) -> str:
    """Return the command for an extra: of the package by its name if it is installed, else of its folder by the path.

    Where it is not installed, pip would look for the name in its index, where it may be somebody else's.
    """
    import importlib.metadata  # slow, and seldom needed
    from pathlib import Path

    try:
        importlib.metadata.version("ldm_lite")
        name = "ldm_lite"
    except importlib.metadata.PackageNotFoundError:
        name = str(Path(__file__).parents[2])
    return f'pip install "{name}[{extra}]"'
