"""Moves the pages of a KV cache from a prefill to a decode worker.

Public: node.TransferNode, settings, events. Knows no engine.
"""
