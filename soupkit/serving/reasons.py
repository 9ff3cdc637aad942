"""What a client is told of a fault: its reason, without a folder of this machine.

The log has the whole text. A fault of ours is named by its type only.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from soupkit.errors import SoupkitError

logger = logging.getLogger(__name__)

# The folders of an absolute path, its last part excepted.
_FOLDERS = re.compile(r"(?<![\w./:-])/(?:[^\s/'\"]+/)+")


class Reasons:
    """Texts of errors with the named folders taken off, and the folders of any other path."""

    def __init__(self, folders: Iterable[str | Path]) -> None:
        spellings = {str(spelling) for path in folders for spelling in (path, Path(path).resolve())}
        # A folder inside another goes first. "." and "/" are in every text.
        self._folders = sorted(spellings - {".", "/"}, key=len, reverse=True)

    def of(self, error: BaseException) -> str:
        """The reason of an error, for a client."""
        if not isinstance(error, SoupkitError | OSError):
            logger.error("unexpected", exc_info=error)
            return f"internal error ({type(error).__name__})"
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        for folder in self._folders:
            text = text.replace(f"{folder}/", "")
        return _FOLDERS.sub("", text)
