"""The parts that every service's process shares.

They are settings, signals, the HTTP server, its limits and its access check.
"""
