"""Messages as bytes: frames, their limits, and numbers in them.

Decides what is no message. A frame is its body's length (4 bytes, little-endian) and the body.
Refuses to know what messages mean.
"""

from __future__ import annotations

import struct
import sys
from collections import deque
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.sidecar.protocol import Message, Request
from prefetchd.sidecar.replies import Reply

HEAD_BYTES = 4
_HEAD = struct.Struct("<I")
_LITTLE = sys.byteorder == "little"
_SIZES: dict[type[Any], int] = {
    kind: np.dtype(kind).itemsize for kind in (np.int64, np.float32, np.uint8)
}

Array = TypeVar("Array", bound=np.generic)


class ProtocolError(Exception):
    """What has come is no message, or breaks a limit; the connection cannot go on."""


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_NO_MESSAGE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


def request_of(body: bytes | memoryview) -> Request:
    """Raises ProtocolError."""
    try:
        return _requests.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from error


def reply_of(body: bytes | memoryview) -> Reply:
    """Raises ProtocolError."""
    try:
        return _replies.decode(body)
    except _NO_MESSAGE as error:
        raise _no_message(body, error) from error


def _no_message(body: bytes | memoryview, error: Exception) -> ProtocolError:
    return ProtocolError(f"a frame of {len(body)} bytes is no message: {error}")


class Frames:
    """Bodies out of a stream that comes in pieces. `limit_bytes` may be changed as it goes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.whole: deque[bytes | memoryview] = deque()
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        """Raises ProtocolError for a frame that is longer than the limit, before it has come."""
        if not self._rest and len(data) >= HEAD_BYTES:
            (length,) = _HEAD.unpack_from(data)
            if len(data) == HEAD_BYTES + length <= HEAD_BYTES + self.limit_bytes:
                self.whole.append(data[HEAD_BYTES:])  # one message, as nearly always
                return
        if self._rest:
            self._rest += data
            source: bytes | bytearray = self._rest
        else:
            source = data
        at, end = 0, len(source)
        while end - at >= HEAD_BYTES:
            (length,) = _HEAD.unpack_from(source, at)
            if length > self.limit_bytes:
                raise ProtocolError(
                    f"a frame of {length} bytes; at most {self.limit_bytes} are allowed"
                )
            if end - at - HEAD_BYTES < length:
                break
            self.whole.append(bytes(source[at + HEAD_BYTES : at + HEAD_BYTES + length]))
            at += HEAD_BYTES + length
        if source is data:
            self._rest += data[at:]
        else:
            del self._rest[:at]


def array_of(
    raw: bytes, dtype: type[Array], most: int, what: str, length: int | None = None
) -> NDArray[Array]:
    """The numbers in a message. Raises ProtocolError for a broken, too long or wrong number."""
    size = _SIZES[dtype]
    count, odd = divmod(len(raw), size)
    if odd or count > most or (length is not None and count != length):
        expected = f"{length} numbers" if length is not None else f"at most {most} numbers"
        raise ProtocolError(f"{what}: {len(raw)} bytes are not {expected} of {size} bytes")
    array = np.frombuffer(raw, dtype)
    return array if _LITTLE else array.byteswap()


def raw_of(array: NDArray[np.generic], dtype: type[np.generic]) -> bytes:
    if array.dtype != dtype:
        array = array.astype(dtype)
    return (array if _LITTLE else array.byteswap()).tobytes()
