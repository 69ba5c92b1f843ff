"""Functions and classes of the user's own, named as `path/to/file.py:name`. No torch."""
