"""Turn an event log into page records in a worker process, for a server that was sent the log.

The request is the log. The reply is a zero and the records, or a one and the reason of a refusal.
The log comes from a stranger, so the kernel limits the process. It exits with `TOO_LARGE` beyond
the limit.
"""

import io
import os

from mie.base import worker_side
from mie.errors import TraceError
from mie.events.file import segments_of
from mie.page.cells import NodeText
from mie.page.recording import Recording

TOO_LARGE = 77
NAME = "the log"
"""The name of the file in messages. The file's own name is not known here."""


def main(cpu_seconds: str, memory_bytes: str, output_bytes: str) -> None:
    """Answer one request."""
    log = worker_side.read_message() or b""
    worker_side.limit_address_space(int(memory_bytes))
    worker_side.limit_cpu_seconds(float(cpu_seconds))
    try:
        recording = Recording(segments_of(NAME, io.BytesIO(log)), NodeText())
        reply = b"\0" + "".join(line + "\n" for line in recording.lines(NAME)).encode()
    except TraceError as error:
        reply = b"\1" + str(error).encode("utf-8", "replace")
    except MemoryError:
        os._exit(TOO_LARGE)
    if len(reply) > int(output_bytes):
        os._exit(TOO_LARGE)
    worker_side.write_message(reply)
