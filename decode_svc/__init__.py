"""The decode side of the handoff."""

from decode_svc.role import DecodeRole as DecodeRole
