"""The version of soupkit; its own module so that setuptools reads it without importing the package."""

__version__ = "0.1.0"
