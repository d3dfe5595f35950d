"""Families of models, one file each: rows of their networks, noise process and defaults; see zoo/families.py."""
