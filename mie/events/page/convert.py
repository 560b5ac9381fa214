"""Turn an event log into page records in a separate process, for a server that was sent the log.

    python -I -S convert.py DIRECTORY CPU_SECONDS MEMORY_BYTES OUTPUT_BYTES < log > records

The log comes from a stranger, so the kernel limits the process. It exits with 2 and a
message on standard error if the log is refused, and with `OUT_OF_MEMORY` if there is not enough.
"""

import os
import resource
import sys

OUT_OF_MEMORY = 77
REFUSED = 2
NAME = "the log"
"""The name of the file in messages. Its own name is not known here."""


def main() -> int:
    """Convert standard input, and return the exit code."""
    directory, seconds, memory, output = sys.argv[1:]
    _limit(int(seconds), int(memory), int(output))
    sys.path.append(directory)
    from mie.errors import TraceError
    from mie.events import read_log
    from mie.events.page.cells import NodeText
    from mie.events.page.recording import Recording

    source = "/dev/stdin"
    try:
        recording = Recording(read_log(source), NodeText())
        for line in recording.lines(NAME):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except TraceError as error:
        sys.stderr.write(str(error).replace(source, NAME))
        return REFUSED
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    return 0


def _limit(seconds: int, memory: int, output: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
    for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
