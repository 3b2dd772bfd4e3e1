"""UCX's active messages, looked at where UCX received them.

ucxx offers them only with a copy of each into memory of its own, so ctypes asks UCX itself. The structures are those of
ucp.h, whose masks say which fields are read: they may grow.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_MESSAGE_ID = 0x7D  # any but 0, which is ucxx's
_IN_PROGRESS = 1
_FIRST_ERROR = 2**64 - 100  # UCS_ERR_LAST as a pointer: what is above is a status, not a request
_IS_RENDEZVOUS = 1 << 17  # UCP_AM_RECV_ATTR_FLAG_RNDV
_ID_AND_CALLBACK = 1 << 0 | 1 << 2
_NO_OPTIONS = (ctypes.c_uint64 * 16)()  # a ucp_request_param_t whose mask names no field


class _HandlerParams(ctypes.Structure):
    """ucp_am_handler_param_t."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("id", ctypes.c_uint),
        ("flags", ctypes.c_uint32),
        ("callback", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # argument
    ctypes.c_void_p,  # header
    ctypes.c_size_t,
    ctypes.c_void_p,  # data
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint64),  # ucp_am_recv_param_t begins with its mask
)


@cache
def _ucp() -> ctypes.CDLL:
    library = ctypes.CDLL("libucp.so.0")  # loaded by ucxx: this finds the same one
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ucp_worker_set_am_recv_handler.argtypes = (pointer, ctypes.POINTER(_HandlerParams))
    library.ucp_am_send_nbx.argtypes = (pointer, ctypes.c_uint, pointer, size, pointer, size, pointer)
    library.ucp_am_recv_data_nbx.argtypes = (pointer, pointer, pointer, size, pointer)
    library.ucp_am_send_nbx.restype = library.ucp_am_recv_data_nbx.restype = pointer
    library.ucp_request_check_status.argtypes = library.ucp_request_free.argtypes = (pointer,)
    # ucs_status_t is a packed enum.
    library.ucp_request_check_status.restype = library.ucp_worker_set_am_recv_handler.restype = ctypes.c_byte
    library.ucp_request_free.restype = None
    return library


class Operation:
    """The first `nbytes` of `buffer` on their way. The memory lives here until `is_done`: UCX holds no reference."""

    def __init__(self, buffer: np.ndarray, nbytes: int, request: int | None) -> None:
        self.buffer, self.nbytes = buffer, nbytes
        self._request, self._status = None, 0
        if request is not None and request >= _FIRST_ERROR:
            self._status = request - 2**64
        else:
            self._request = request

    @property
    def is_done(self) -> bool:
        if self._request is not None:
            status = _ucp().ucp_request_check_status(self._request)
            if status != _IN_PROGRESS:
                _ucp().ucp_request_free(self._request)
                self._request, self._status = None, status
        return self._request is None

    @property
    def error(self) -> str:
        """Of one that is done; empty if it went well."""
        return f"status {self._status}" if self._status else ""


def send(endpoint: int, buffer: np.ndarray, nbytes: int) -> Operation:
    """`buffer`: uint8, contiguous. Never blocks."""
    request = _ucp().ucp_am_send_nbx(endpoint, _MESSAGE_ID, None, 0, buffer.ctypes.data, nbytes, _NO_OPTIONS)
    return Operation(buffer, nbytes, request)


class Receiving:
    """Messages that come to a worker, for as long as this lives.

    `on_message(data)` is called while the worker is driven, and raises nothing; the bytes are gone when it returns.
    What UCX has not fetched yet goes into a `spare()` buffer, and the operation to `on_fetch`; too much for it is an
    error of the operation.
    """

    def __init__(
        self,
        worker: int,
        on_message: Callable[[np.ndarray], None],
        spare: Callable[[], np.ndarray],
        on_fetch: Callable[[Operation], None],
    ) -> None:
        self._worker, self._on_message, self._spare, self._on_fetch = worker, on_message, spare, on_fetch
        self._callback = _Callback(self._on_arrival)  # UCX keeps its address, nothing else keeps it alive
        params = _HandlerParams(_ID_AND_CALLBACK, _MESSAGE_ID, 0, ctypes.cast(self._callback, ctypes.c_void_p), None)
        status = _ucp().ucp_worker_set_am_recv_handler(worker, ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"ucp_worker_set_am_recv_handler: status {status}")

    def _on_arrival(self, argument: int, header: int, header_nbytes: int, data: int, nbytes: int, param: Any) -> int:
        if param[0] & _IS_RENDEZVOUS:
            buffer = self._spare()
            fits = min(nbytes, len(buffer))  # less than it is: UCX fails it
            request = _ucp().ucp_am_recv_data_nbx(self._worker, data, buffer.ctypes.data, fits, _NO_OPTIONS)
            self._on_fetch(Operation(buffer, fits, request))
            return _IN_PROGRESS
        self._on_message(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(data)))
        return 0
