"""What crosses a process:

frozen, torch-free types and the bytes they become. Imports the standard library and msgspec only.
"""
