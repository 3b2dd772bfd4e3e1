"""The frozen, torch-free types that cross a process, and the bytes they become.

This package imports the standard library and msgspec only.
"""
