"""The program of the process of a rank (`mie.load.ranks`)."""

import os
import pickle
import sys

from mie.base import worker_side


def main(rank: str, file: str, parent: str) -> None:
    """Run a rank. Its last words are a message to rank 0, if it fails."""
    data = worker_side.read_message()
    if data is None:
        return
    path, environment = pickle.loads(data)
    sys.path += [each for each in path if each and each not in sys.path]
    os.environ.update(environment)
    try:
        from mie.load.ranks import run_rank  # after the environment, which libraries read

        run_rank(int(rank), int(file), int(parent))
    except Exception as error:
        worker_side.write_message(f"{type(error).__name__}: {error}".encode())
        sys.exit(1)
