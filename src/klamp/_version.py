"""The one place that states klamp's version."""

__version__ = "0.1.0"
