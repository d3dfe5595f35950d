"""The version of the package, which PNG texts and reports state."""

__version__ = "0.1.0"
