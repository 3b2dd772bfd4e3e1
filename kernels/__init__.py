"""Every operation of an FP8 transformer, each in several implementations (docs/design/kernels.md)."""

__version__ = "0.0.0"
