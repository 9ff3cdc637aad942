"""Files with the keys that clients of a server show, one a line."""

from pathlib import Path


def read_keys(option: str, path: str | Path | None) -> list[str]:
    """The keys of a file, one a line; none without a file."""
    if path is None:
        return []
    try:
        keys = Path(path).read_text("ascii").split()
    except UnicodeDecodeError:
        raise ValueError(f"{option}={str(path)!r} is no ASCII text; write keys only") from None
    except OSError as error:
        raise ValueError(f"{option}={str(path)!r} cannot be read: {error.strerror}") from None
    if not keys:
        raise ValueError(f"{option}={str(path)!r} holds no key; write one a line")
    return keys
