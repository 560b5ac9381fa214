"""Check that ranks exchange arrays and commands, and give up a command together."""

import mmap
import threading

import numpy as np
import pytest
from deadlines import join
from forks import exit_code_of_child

from mie.errors import WorkerError
from mie.ranks import exchange as module
from mie.ranks.exchange import Abandoned, Exchange, memory_bytes
from mie.ranks.share import Share


def exchanges(num_ranks, check=lambda: None):
    memory = mmap.mmap(-1, memory_bytes(num_ranks, 0))
    made = [Exchange(memory, Share(rank, num_ranks), check) for rank in range(num_ranks)]
    made[0].set_up()
    return made


def together(made, function):
    """Call a function with each exchange, in a thread each, and return the results."""
    results = [None] * len(made)

    def call(rank):
        results[rank] = function(made[rank])

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    join(*threads)
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_are_gathered_in_pieces(monkeypatch, num_ranks, dtype):
    monkeypatch.setattr(module, "HALF_BYTES", 4096)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((count, 50)).astype(dtype) for count in (1, 0, 100, 7)]

    def gather(own):
        part, results = own.share.part(50), []
        for array in arrays:
            for added in (None, array):
                results.append(np.empty_like(array))
                own.gather(results[-1], array[:, part.start : part.stop], added)
        return results

    for results in together(exchanges(num_ranks), gather):
        for array, plain, doubled in zip(arrays, results[::2], results[1::2], strict=True):
            assert np.array_equal(plain, array)
            assert np.array_equal(doubled, array + array)


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000])
def test_bytes_of_all_ranks_are_collected(monkeypatch, size):
    monkeypatch.setattr(module, "HALF_BYTES", 16384)
    wanted = [bytes([rank] * size) for rank in range(3)]
    given = together(exchanges(3), lambda own: own.collect(wanted[own.share.rank]))
    assert given == [wanted] * 3


def test_each_row_is_picked_from_the_rank_that_has_it():
    owners = np.array([0, 2, 2, 1, 0])

    def pick(own):
        x, out = np.full((5, 3), own.share.rank, np.float32), np.empty((5, 3), np.float32)
        own.pick(out, x, owners == own.share.rank)
        return out

    for out in together(exchanges(3), pick):
        assert np.array_equal(out, np.repeat(owners, 3).reshape(5, 3))


@pytest.mark.parametrize("size", [0, 4000, 4096, 100_000, 5 << 20])
def test_a_command_of_any_size_arrives(size):
    def run(own):
        if own.share.rank:
            return own.receive()
        with own.command("name", 3, b"x" * size):
            return None

    assert together(exchanges(3), run) == [None, *[("name", (3, b"x" * size))] * 2]


def test_an_interrupted_command_is_given_up_by_all():
    """Rank 0 is interrupted at each of its waits in turn. The next command runs as if alone."""
    made, rounds = exchanges(3), 4

    def follow(own):
        done = 0
        while done < rounds:
            try:
                name, _ = own.receive()
                for _ in range(3):
                    own.gather(np.empty((1, 3)), np.empty((1, 1)))
                done += name == "whole"
            except Abandoned:
                own.rejoin()
        return done

    def run_broken(own):
        with own.command("broken"):
            for _ in range(3):
                own.gather(np.empty((1, 3)), np.empty((1, 1)))
            raise KeyboardInterrupt

    def lead(own):
        original = own._await_others
        for number in range(rounds):
            waits = iter(range(number))

            def interrupted(waits=waits, **options):
                if next(waits, None) is None:
                    raise KeyboardInterrupt
                original(**options)

            own._await_others = interrupted
            with pytest.raises(KeyboardInterrupt):
                run_broken(own)
            own._await_others = original
            out = np.empty((1, 3))
            with own.command("whole"):
                for _ in range(3):
                    own.gather(out, np.empty((1, 1)))
        return rounds

    assert together(made, lambda own: (follow if own.share.rank else lead)(own)) == [rounds] * 3


@pytest.mark.parametrize("wait", [lambda own: own.wait(lambda: False), lambda own: own.expect(60)])
def test_a_wait_ends_when_rank_0_gives_up_the_command(wait):
    left = []

    def run(own):
        if own.share.rank == 0:
            own.start_over(lambda: left.append(own))
        else:
            with pytest.raises(Abandoned):
                wait(own)
            own.rejoin()
        own.wait(lambda: True)
        return own.is_clean

    made = exchanges(2)
    assert together(made, run) == [True, True]
    assert left == made[:1]


def test_a_rank_that_ends_is_an_error():
    def ended():
        raise WorkerError("rank 1 of 2 has ended: signal 9")

    [own, _] = exchanges(2, ended)
    with pytest.raises(WorkerError, match="rank 1 of 2 has ended"), own.command("name"):
        pass
    for wait in (lambda: own.wait(lambda: False), lambda: own.expect(60)):
        with pytest.raises(WorkerError, match="rank 1 of 2 has ended"):
            wait()


def test_a_silent_rank_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.0)
    [own, other] = exchanges(2)
    threading.Thread(target=other.receive, daemon=True).start()
    with own.command("name"):
        pass
    for _ in range(2):
        with pytest.raises(WorkerError, match="rank 1 of 2 neither ended"), own.command("name"):
            pass
    with pytest.raises(WorkerError, match="the 2 ranks did not finish an exchange for 0 s"):
        own.wait(lambda: False)


def test_a_fork_is_refused():
    [own, _] = exchanges(2)

    def command():
        with pytest.raises(WorkerError, match="load the model after the fork"):
            own.command("name").__enter__()

    assert exit_code_of_child(command) == 0
