"""Serve images over HTTP: OpenAI's and AUTOMATIC1111's APIs, and a page: `python -m ldm_lite.serve`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ldm_lite.cli import console
from ldm_lite.cli.files import read_text
from ldm_lite.cli.flags import parse
from ldm_lite.cli.options import LoadOptions
from ldm_lite.cli.version import pip_install
from ldm_lite.serve.options import ServeOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    (options, load), _ = parse(argv, "serve", __doc__.splitlines()[0], (ServeOptions, LoadOptions))
    kept = "requests that ran have been answered"
    return console.run(lambda: run(options, load), (options, load), kept=kept)


def run(options: ServeOptions, load: LoadOptions) -> None:
    """Load the model and serve until a signal comes.  Raises ValueError, OSError."""
    try:
        if options.replicas:
            from ldm_lite.serve.ray import serve_on_ray as serve
        else:
            from ldm_lite.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("ldm_lite"):
            raise
        extra = "serve,serve-ray" if options.replicas else "serve"
        raise ValueError(f"the server needs {error.name}: {pip_install(extra)}") from None
    serve(options, load, key_of(options))


def key_of(options: ServeOptions) -> str | None:
    """Return the key that requests need, which @FILE holds.  Raises ValueError, OSError."""
    key = options.api_key
    if key is not None and key.startswith("@"):
        key = read_text(Path(key[1:])).strip()
    if key is not None and (not key.isascii() or len(key) < 8):
        raise ValueError(f"got an `api_key` of {len(key)} characters, expected 8 or more of ASCII")
    return key


if __name__ == "__main__":
    sys.exit(main())
