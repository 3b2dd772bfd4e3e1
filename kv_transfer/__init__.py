"""The transfer of KV cache pages from a prefill to a decode worker.

Public: node.TransferNode, settings, events. It does not depend on the engine.
"""
