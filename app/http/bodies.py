"""Read request bodies: refuse compressed ones, time out slow ones, and parse forms as they arrive.

A form is a multipart body with one file, which is buffered neither in memory nor on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator

from anyio import current_time, fail_after, from_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from app.errors import InvalidRequest, Stalled, TooLarge, UnsupportedMedia

WAIT_S = 30.0  # for the next LEAST_BYTES to arrive; our own processing does not count
LEAST_BYTES = 1 << 16
_MAX_BOUNDARY = 256  # the parser's limit; RFC 2046 allows 70
_MAX_FIELD = 65_536
_MAX_FIELDS = 32


def are_compressed(headers: Headers) -> bool:
    """Return True if a request's headers declare a compressed body."""
    return headers.get("content-encoding", "identity").lower() != "identity"


def limit_pace(receive: Receive) -> Receive:
    """Return a `receive` that raises `Stalled` (408) if a body arrives too slowly; no limit applies after its end."""
    waited_s, brought, is_whole = 0.0, 0, False

    async def receive_in_time() -> Message:
        nonlocal waited_s, brought, is_whole
        if is_whole:
            return await receive()
        began = current_time()
        try:
            # Only the time within `receive` counts: a slow storage on our side must not time out the client.
            with fail_after(WAIT_S - waited_s):
                message = await receive()
        except TimeoutError:
            text = f"The body comes too slowly: {brought} bytes in {WAIT_S:g} s, at least {LEAST_BYTES} are needed."
            raise Stalled(text) from None
        waited_s += current_time() - began
        brought += len(message.get("body", b""))
        if brought >= LEAST_BYTES:
            waited_s, brought = 0.0, 0
        is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receive_in_time


def chunks(stream: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield a request's body in chunks; call it from a worker thread."""

    async def fetch() -> bytes | None:
        return await anext(stream, None)

    while (chunk := from_thread.run(fetch)) is not None:
        yield chunk


class Form:
    """The fields and the one file of a request; fields after the file are known once the file was read.

    `body` yields the raw body in chunks, `part` is the name of the file's part, and `body_bytes` the announced length
    of the body, if any. Raises `UnsupportedMedia`, `InvalidRequest` or `TooLarge` for a malformed form.

        form = Form(request.headers["content-type"], chunks)
        fields = form.fields_before_file()
        stored = storage.write(key, form.file())
    """

    def __init__(
        self, content_type: str, body: Iterable[bytes], part: str = "file", body_bytes: int | None = None
    ) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not 1 <= len(options.get(b"boundary", b"")) <= _MAX_BOUNDARY:
            message = f"Send the file as multipart/form-data with a boundary of at most {_MAX_BOUNDARY} characters."
            raise UnsupportedMedia(message, code="unsupported_content_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._part = part
        self._body = iter(body)
        self._body_bytes = body_bytes  # the announced length
        self._closing_bytes = len(options[b"boundary"]) + len(
            b"\r\n----\r\n"
        )  # all common clients send the final line break
        self._read_bytes = self._file_at = 0
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name_part,
                "on_header_value": self._header_value_part,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )
        self._pieces: deque[bytes] = deque()
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._field: tuple[str, bytearray] | None = None
        self._is_complete = False

    def fields_before_file(self) -> dict[str, str]:
        """Read up to the file, and return the fields that precede it."""
        self._read_to_file()
        return self.fields

    def file(self) -> Iterator[bytes]:
        """Yield the file's bytes, then read the rest of the body."""
        self._read_to_file()
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if not self._read():
                return

    def most_bytes(self, limit: int) -> int:
        """Return the largest size that the file can have in a body of the announced length, at most `limit`."""
        if self._body_bytes is None:
            return limit
        self._read_to_file()
        while not self._pieces and self._read():
            pass
        return min(max(self._body_bytes - self._file_at - self._closing_bytes, 0), limit)

    def drain(self, limit: int) -> bool:
        """Read and drop up to `limit` more bytes; return False if more follow.

        A client that is still sending reads the answer only after it has sent its body.
        """
        for chunk in self._body:
            limit -= len(chunk)
            if limit < 0:
                return False
        return True

    def _read_to_file(self) -> None:
        """Read the fields that precede the file, and the file's name."""
        while self.filename is None:
            if not self._read():
                raise InvalidRequest("The form has no file.", code="missing_field", param=self._part)

    def _read(self) -> bool:
        chunk = next(self._body, None)
        try:
            if chunk is not None:
                self._parser.write(chunk)
                self._read_bytes += len(chunk)
                return True
            self._parser.finalize()
        except FormParserError:
            raise InvalidRequest("The multipart body is malformed.", code="invalid_multipart") from None
        if not self._is_complete:
            raise InvalidRequest("The multipart body ends too early.", code="invalid_multipart")
        return False

    def _begin(self) -> None:
        self._headers, self._field = {}, None
        self._header_name = self._header_value = b""

    def _header_name_part(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_part(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" not in options:
            if len(self.fields) >= _MAX_FIELDS:
                raise TooLarge(f"The form has more than {_MAX_FIELDS} fields.", code="too_many_fields")
            self._field = (name, bytearray())
        elif name != self._part or self.filename is not None:
            message = f'Send one file, in the part "{self._part}".'
            raise InvalidRequest(message, code="invalid_multipart", param=self._part)
        else:
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            # Where the file begins in the body: with the announced length this bounds its size.
            self._file_at = self._file_at or self._read_bytes + start
            self._pieces.append(data[start:end])
            return
        name, value = self._field
        value += data[start:end]
        if len(value) > _MAX_FIELD:
            raise TooLarge(f'The field "{name[:64]}" is too large.', code="field_too_large")

    def _end(self) -> None:
        if self._field:
            name, value = self._field
            self.fields[name] = value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._is_complete = True
