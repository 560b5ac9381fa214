"""Define the package's version. The build also reads it."""

__version__ = "0.1.0"
__version_tuple__ = tuple(int(each) for each in __version__.split("."))
