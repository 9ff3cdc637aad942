"""soupkit: merge fine-tunes while they train, store them as one-bit deltas, serve many on one base.

Importing this package loads neither torch nor any framework; the working parts are imported by
module (`soupkit.training`, `soupkit.merge`, `soupkit.bundle`, ...).
"""

from soupkit.config import ExportConfig, SoupConfig
from soupkit.version import __version__

__all__ = ["ExportConfig", "SoupConfig", "__version__"]
