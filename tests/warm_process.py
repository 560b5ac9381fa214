"""Run programs in forked children of a process that has imported ``mie``.

`command_line.mie` starts this program with one end of a socket. Python starts and imports for half
of the time of a short command, and tests run hundreds of them. Each message carries four files: the
case as JSON, and the child's standard streams. The answer is the exit code.
"""

import gc
import importlib
import json
import os
import pkgutil
import runpy
import socket
import sys
import warnings

import mie.cli
from mie import LLM

assert LLM  # loaded before the first fork


def main() -> int:
    for module in pkgutil.iter_modules(mie.cli.__path__):
        importlib.import_module(f"mie.cli.{module.name}")
    gc.freeze()  # so that a child's collections do not copy shared pages
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1, 4)
        if not message:
            return 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of OpenBLAS's idle threads
            child = os.fork()
        if child == 0:
            connection.close()
            return run(*files)
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        connection.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode() + b"\n")


def run(case: int, *files: int) -> int:
    """Become a process that was started with these streams, and run the command line or program."""
    with open(case, encoding="utf-8") as file:
        wanted = json.load(file)
    for number, file_of_stream in enumerate(files):
        os.dup2(file_of_stream, number)
        os.close(file_of_stream)
    streams = (open(0), open(1, "w"), open(2, "w", buffering=1))  # noqa: SIM115  # until exit
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(wanted["directory"])
    if program := wanted["program"]:
        sys.argv = [program, *wanted["arguments"]]
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")
        return 0
    sys.argv = ["mie", *wanted["arguments"]]
    return mie.cli.main()


if __name__ == "__main__":
    sys.exit(main())
