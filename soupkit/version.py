"""The version of soupkit, apart so that setuptools reads it without importing the package."""

__version__ = "0.1.0"
