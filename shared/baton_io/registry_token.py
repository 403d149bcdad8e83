"""The token that a registry demands for writes, from a file: a secret in a flag or a variable shows up everywhere."""

from pathlib import Path


def read_token(path: str | None) -> str | None:
    """The token in this file, None without one. Raises OSError, and ValueError where the file is empty."""
    if path is None:
        return None
    token = Path(path).read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"{path}: the file is empty")
    return token
