"""The transports and devices that a UCX endpoint really uses, as UCX itself reports them.

ucxx does not offer ucp_ep_query, so it is called by ctypes.
"""

import ctypes

_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 16


class _Entry(ctypes.Structure):
    """The C structure ucp_transport_entry_t of ucp_def.h."""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    """The C structure ucp_transports_t of ucp_def.h."""

    _fields_ = (
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    """The C structure ucp_ep_attr_t of ucp.h; a sockaddr_storage is 128 bytes aligned to 8."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint64 * 16),
        ("remote_sockaddr", ctypes.c_uint64 * 16),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def endpoint_lanes(handle: int) -> str:
    """Return the lanes of this ucp_ep_h, like "tcp/eth0, tcp/lo", or that UCX does not report them."""
    entries = (_Entry * _MAX_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports = _Transports(entries, _MAX_LANES, ctypes.sizeof(_Entry))
    library = ctypes.CDLL("libucp.so.0")  # loaded by ucxx: this finds the same one
    library.ucp_ep_query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    status = library.ucp_ep_query(handle, ctypes.byref(attributes))
    if status != 0:
        return f"lanes unknown (ucp_ep_query: {status})"
    used = entries[: attributes.transports.num_entries]
    return ", ".join(f"{_text(entry.transport_name)}/{_text(entry.device_name)}" for entry in used)


def _text(value: bytes | None) -> str:
    return value.decode() if value else "?"
