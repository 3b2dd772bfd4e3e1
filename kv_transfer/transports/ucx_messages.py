"""The active messages of UCX, taken where UCX received them.

ucxx offers them only with a copy of each into memory of its own, so UCX is called by ctypes. The structures are those
of ucp.h, whose masks say which fields are read: they may grow.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kv_transfer.chunks.device_pool import Buffer

_MESSAGE_ID = 0x7D  # any but 0, which ucxx uses
_IN_PROGRESS = 1
_FIRST_ERROR = 2**64 - 100  # UCS_ERR_LAST as a pointer: what is above is a status, not a request
_IS_RENDEZVOUS = 1 << 17  # UCP_AM_RECV_ATTR_FLAG_RNDV
_ID_AND_CALLBACK = 1 << 0 | 1 << 2
_NO_OPTIONS = (ctypes.c_uint64 * 16)()  # a ucp_request_param_t whose mask names no field
_MEMORY_TYPE, _MEMORY_TYPE_AT = 1 << 6, 6  # its bit in the mask, and its index in eight-byte words
_PATH_NBYTES = 256


class _HandlerParams(ctypes.Structure):
    """The C structure ucp_am_handler_param_t."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("id", ctypes.c_uint),
        ("flags", ctypes.c_uint32),
        ("callback", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
    )


class _RequestAttributes(ctypes.Structure):
    """The C structure ucp_request_attr_t; mask 3 names the string and its size."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("debug_string", ctypes.c_char_p),
        ("debug_string_size", ctypes.c_size_t),
        ("status", ctypes.c_byte),
        ("memory_type", ctypes.c_int),
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
    library.ucp_ep_flush_nbx.argtypes = (pointer, pointer)
    library.ucp_am_send_nbx.restype = library.ucp_ep_flush_nbx.restype = library.ucp_am_recv_data_nbx.restype = pointer
    library.ucp_request_check_status.argtypes = library.ucp_request_free.argtypes = (pointer,)
    # ucs_status_t is a packed enum.
    library.ucp_request_check_status.restype = library.ucp_worker_set_am_recv_handler.restype = ctypes.c_byte
    library.ucp_request_query.argtypes = (pointer, ctypes.POINTER(_RequestAttributes))
    library.ucp_request_query.restype = ctypes.c_byte
    library.ucp_request_free.restype = None
    return library


class Operation:
    """An operation of UCX on the first `nbytes` of `buffer`.

    It keeps the memory alive until `is_done`: UCX holds no reference.
    """

    def __init__(self, buffer: Any, nbytes: int, request: int | None) -> None:
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
    def path(self) -> str:
        """Return how UCX moves what is not sent yet, in UCX's words; empty if unknown or already sent."""
        words = ctypes.create_string_buffer(_PATH_NBYTES)
        attributes = _RequestAttributes(3, ctypes.cast(words, ctypes.c_char_p), _PATH_NBYTES)
        if self._request is None or _ucp().ucp_request_query(self._request, ctypes.byref(attributes)):
            return ""
        return words.value.decode().partition(" length ")[2].partition(" ")[2]

    @property
    def error(self) -> str:
        """Return the error of an operation that is done; empty if it succeeded."""
        return f"status {self._status}" if self._status else ""


def send(endpoint: int, buffer: np.ndarray, nbytes: int) -> Operation:
    """Send the first `nbytes` of `buffer`, uint8, contiguous. Never blocks."""
    request = _ucp().ucp_am_send_nbx(endpoint, _MESSAGE_ID, None, 0, buffer.ctypes.data, nbytes, _NO_OPTIONS)
    return Operation(buffer, nbytes, request)


def flush(endpoint: int) -> Operation:
    """Return an operation that is done when all that was sent has left. Never blocks.

    Before the first message, it is done when both ends have found each other.
    """
    return Operation(None, 0, _ucp().ucp_ep_flush_nbx(endpoint, _NO_OPTIONS))


def send_from(endpoint: int, header: np.ndarray, buffer: Buffer, nbytes: int, memory: int) -> Operation:
    """Send bytes of `buffer` with a header in front; see `memory_type`. Never blocks.

    The operation keeps the header, which UCX reads until it is sent.
    """
    where = header.ctypes.data, len(header), buffer.address, nbytes
    request = _ucp().ucp_am_send_nbx(endpoint, _MESSAGE_ID, *where, memory_type(memory))
    return Operation((header, buffer), nbytes, request)


def fetch_into(worker: int, message: int, buffer: Buffer, nbytes: int, memory: int) -> Operation:
    """Fetch a message that Offering has reported without its bytes. Never blocks."""
    request = _ucp().ucp_am_recv_data_nbx(worker, message, buffer.address, nbytes, memory_type(memory))
    return Operation(buffer, nbytes, request)


@cache
def memory_type(memory: int) -> Any:
    """Return the request options that say where its bytes are: ucs_memory_type_t, 0 the host and 1 CUDA."""
    options = (ctypes.c_uint64 * 16)()
    options[0], options[_MEMORY_TYPE_AT] = _MEMORY_TYPE, memory
    return options


class Offered(NamedTuple):
    """A message with its header. `message`: what `fetch_into` takes, or None if its bytes came along."""

    header: np.ndarray
    nbytes: int
    message: int | None
    data: np.ndarray | None


class Receiving:
    """The receipt of messages that come to a worker, for as long as this object lives.

    `on_message(data)` is called while the worker is driven, and raises nothing; the bytes are gone when it returns.
    What UCX has not fetched yet goes into a `spare()` buffer, and the operation to `on_fetch`; a message that is too
    long for the buffer is an error of the operation.
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
        _handle(worker, self._callback)

    def _on_arrival(self, argument: int, header: int, header_nbytes: int, data: int, nbytes: int, param: Any) -> int:
        if param[0] & _IS_RENDEZVOUS:
            buffer = self._spare()
            fits = min(nbytes, len(buffer))  # if it does not fit, UCX fails it
            request = _ucp().ucp_am_recv_data_nbx(self._worker, data, buffer.ctypes.data, fits, _NO_OPTIONS)
            self._on_fetch(Operation(buffer, fits, request))
            return _IN_PROGRESS
        self._on_message(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(data)))
        return 0


class Offering:
    """The receipt of messages with headers, which stay in UCX until they are fetched.

    `on_message` only gets notice of them, while the worker is driven, and raises nothing.
    """

    def __init__(self, worker: int, on_message: Callable[[Offered], None]) -> None:
        self._on_message, self._callback = on_message, _Callback(self._on_arrival)
        _handle(worker, self._callback)

    def _on_arrival(self, argument: int, header: int, header_nbytes: int, data: int, nbytes: int, param: Any) -> int:
        said = _copied(header, header_nbytes)
        if param[0] & _IS_RENDEZVOUS:
            self._on_message(Offered(said, nbytes, data, None))
            return _IN_PROGRESS
        self._on_message(Offered(said, nbytes, None, _copied(data, nbytes)))
        return 0


def _copied(address: int, nbytes: int) -> np.ndarray:
    if not nbytes:
        return np.zeros(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).copy()


def _handle(worker: int, callback: Any) -> None:
    """Register the callback for every message. The caller keeps it alive."""
    params = _HandlerParams(_ID_AND_CALLBACK, _MESSAGE_ID, 0, ctypes.cast(callback, ctypes.c_void_p), None)
    status = _ucp().ucp_worker_set_am_recv_handler(worker, ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"ucp_worker_set_am_recv_handler: status {status}")
