"""soupkit: merge fine-tunes while they train, store them as one-bit deltas, serve many on one base.

Importing this package loads neither torch nor any framework; the working parts are imported by module
(`soupkit.training`, `soupkit.merge`, `soupkit.bundle`, ...).
"""

from soupkit.config import ExportConfig, SoupConfig

__version__ = "0.1.0"

__all__ = ["ExportConfig", "SoupConfig", "__version__"]
