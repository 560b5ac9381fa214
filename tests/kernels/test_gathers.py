"""Gather the results of ranks on the emulated GPU, with the stand-in for NCCL between threads."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deadlines import join
from emulated import needs_compiler
from test_kernels import make_backend

from mie.errors import ConfigError
from mie.ops_gpu import gathers as module
from mie.ops_gpu.gathers import nccl_of
from mie.ops_gpu.host import nccl as stand_in
from mie.ops_gpu.host.nccl import Address, EmulatedNccl, NcclError
from mie.ranks.share import Share


class Exchange:
    """All ranks run, and rank 0 has given up no command."""

    def wait(self, is_done: Any) -> None:
        while not is_done():
            pass

    def expect(self, seconds: float) -> None:
        pass


def together(num_ranks: int, function: Any) -> list[Any]:
    """Call a function with each rank, in a thread each, and return the results or exceptions."""
    results: list[Any] = [None] * num_ranks

    def call(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    join(*threads)
    return results


def on_ranks(mode: str, num_ranks: int, dtype: str, vocab_size: int, function: Any) -> list[Any]:
    """Call a function with each rank's number, backend and gathers."""
    backends = [make_backend(mode, dtype) for _ in range(num_ranks)]
    for backend in backends:
        backend.launcher.uploaded = (backend.dtype, np.uint8)  # the stand-in writes them
    made = [each.new_gathers(rank, num_ranks, vocab_size) for rank, each in enumerate(backends)]
    invitation = made[0].invite()

    def run(rank: int) -> Any:
        exchange = Exchange()
        made[rank].connect(exchange)
        made[rank].join(invitation, exchange.wait)
        try:
            return function(rank, backends[rank], made[rank])
        except BaseException:
            made[rank].leave()  # the others need not wait
            raise

    results = together(num_ranks, run)
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def numbers(*shape: int) -> np.ndarray:
    """Return small integers, which every dtype holds, and also twice as much."""
    return np.random.default_rng(0).integers(-99, 100, shape).astype(np.float32)


def check_gathers(mode: str, num_ranks: int = 4, dtype: str = "float32", width: int = 50) -> None:
    """Check every operator of four ranks, whose parts have 12 and 13 columns."""
    whole = numbers(5, width)
    num_heads = max(1, num_ranks // 2)
    heads, table, token_ids = numbers(5, 12), numbers(11, 8), np.int32([10, 0, 5, 7, 2])

    def run(rank: int, backend: Any, own: Any) -> list[np.ndarray]:
        part = Share(rank, num_ranks).part
        columns, rows = part(width), part(11)
        x = np.ascontiguousarray(whole[:, columns.start : columns.stop]).astype(backend.dtype)
        y = own.whole(x, width).copy()
        added = own.whole(x, width, whole.astype(backend.dtype))
        embedding = np.ascontiguousarray(table[rows.start : rows.stop]).astype(backend.dtype)
        tokens = own.embed(token_ids, embedding, 1.0)
        mine = own.own(whole.astype(backend.dtype), len(columns))
        # Two of the columns are the rank's head, and all ranks have six columns together.
        qkv = np.concatenate([heads[:, :1], heads[:, 2 * rank : 2 * rank + 2]], axis=1)
        qkv = qkv.astype(backend.dtype)
        together = own.columns(qkv, 1, range(2 * rank, 2 * rank + 2), 2 * num_ranks)
        replaced = own.replace(qkv, 1, range(2 * rank, 2 * rank + 2), together + together)
        head = Share(rank, num_ranks).heads(num_heads, 3)  # two ranks have the same
        one = whole[:, head.start : head.stop].astype(backend.dtype)
        shared = own.columns(one, 0, head, 3 * num_heads)
        return [
            np.array(each, float) for each in (y, added, tokens, mine, together, replaced, shared)
        ]

    results = on_ranks(mode, num_ranks, dtype, 11, run)
    for rank, (y, added, tokens, mine, together, replaced, shared) in enumerate(results):
        columns = Share(rank, num_ranks).part(width)
        assert np.array_equal(y, whole)
        assert np.array_equal(added, whole + whole)
        assert np.array_equal(tokens, table[token_ids])
        assert np.array_equal(mine, whole[:, columns.start : columns.stop])
        assert np.array_equal(together, heads[:, : 2 * num_ranks])
        assert np.array_equal(replaced[:, 0], heads[:, 0])
        twice = 2 * heads[:, 2 * rank : 2 * rank + 2]
        assert np.array_equal(replaced[:, 1:], twice)
        assert np.array_equal(shared, whole[:, : 3 * num_heads])


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "num_ranks", "dtype"),
    [
        ("checked", 4, "float32"),
        pytest.param("reverse", 2, "float16", marks=pytest.mark.slow),
        pytest.param("reverse", 1, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_parts_of_ranks_become_whole(mode: str, num_ranks: int, dtype: str):
    check_gathers(mode, num_ranks, dtype, 50 if num_ranks == 4 else 48)


@needs_compiler
def test_long_results_are_gathered_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 300)
    check_gathers("reverse")


@needs_compiler
def test_ranks_that_leave_join_again(monkeypatch: pytest.MonkeyPatch):
    """A gather fails in the ranks whose neighbour has left. All join again with a new id."""
    invitations = []

    def run(rank: int, backend: Any, own: Any) -> tuple[str, np.ndarray]:
        x = np.full((1, 1), rank, np.float32)
        if rank == 0:
            own.leave()
            invitations.append(own.invite())
            message = ""
        else:
            with pytest.raises(NcclError) as caught:
                own.whole(x, 2)
            message = str(caught.value)
            own.leave()
            assert own.invite() is not None
        met.wait(60)
        own.join(invitations[0], Exchange().wait)
        assert own.invite() is None
        return message, own.whole(x, 2).copy()

    met = threading.Barrier(2)
    results = on_ranks("reverse", 2, "float32", 4, run)
    assert results[1][0].startswith("call 1 of rank 1: ")
    assert [y.tolist() for _, y in results] == [[[0, 1]]] * 2


# The stand-in.


def communicators(num_ranks: int) -> list[Any]:
    made = [EmulatedNccl(lambda task: task()) for _ in range(num_ranks)]
    unique_id = made[0].get_unique_id()
    given = together(
        num_ranks, lambda rank: made[rank].NcclCommunicator(num_ranks, unique_id, rank)
    )
    assert not any(isinstance(each, Exception) for each in given), given
    return given


def gather(communicator: Any, send: int = 16, count: int = 4, **changes: Any) -> np.ndarray:
    """Gather 4 integers of each of two ranks, or break a rule of the call."""
    x, out = np.full(send // 4, 7, np.int32), np.zeros(changes.pop("room", 8), np.int32)
    call = {"count": count, "datatype": 2, "stream": 0, **changes}
    sent = Address(out[changes.pop("place") :]) if "place" in changes else Address(x)
    call.pop("place", None)
    communicator.allGather(sent, Address(out), **call)
    return out


def test_the_stand_in_gathers_bytes():
    made = communicators(2)
    given = together(2, lambda rank: gather(made[rank]))
    assert [out.tolist() for out in given] == [[7] * 8] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"send": 12}, "sendbuf has 12 bytes; the call needs 16"),
        ({"room": 7}, "recvbuf has 28 bytes; the call needs 32"),
        ({"datatype": 10}, "4 elements of data type 10"),
        ({"datatype": 4}, "sendbuf has 16 bytes; the call needs 32"),
        ({"stream": 3}, "stream 3 is not the backend's stream 0"),
        ({"place": 4}, "not in the place of its rank"),
    ],
)
def test_the_stand_in_checks_a_call(changes: dict[str, int], message: str):
    with pytest.raises(NcclError, match=message):
        gather(communicators(2)[0], **changes)


@pytest.mark.parametrize("calls", [[{}, {"count": 3}], [{}, {"datatype": 7}]])
def test_the_stand_in_notices_ranks_that_make_other_calls(calls: list[dict[str, int]]):
    made = communicators(2)
    errors = together(2, lambda rank: gather(made[rank], **calls[rank]))
    assert all(isinstance(error, NcclError) for error in errors)
    assert str(errors[0]).startswith("rank 1 calls (number, count, data type) (1, ")
    with pytest.raises(NcclError, match="rank 1 calls"):
        made[0].check_async_error()


def test_the_stand_in_waits_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stand_in, "SECONDS", 0.05)
    made = communicators(2)
    with pytest.raises(NcclError, match="call 1 of rank 0: timed out"):
        gather(made[0])
    with pytest.raises(NcclError, match=r"another rank has ended, or has aborted|Broken pipe"):
        gather(made[1])
    alone = EmulatedNccl(lambda task: task())
    with pytest.raises(NcclError, match="the ranks did not meet: timed out"):
        alone.NcclCommunicator(2, alone.get_unique_id(), 0)


# Refusals.


def fake_module(count: int, nccl: Any) -> Any:
    runtime = SimpleNamespace(getDeviceCount=lambda: count, runtimeGetVersion=lambda: 12080)
    used: list[int] = []
    device = lambda number: SimpleNamespace(use=lambda: used.append(number))  # noqa: E731
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, nccl=nccl, Device=device), used=used
    )


def test_each_rank_needs_a_gpu():
    with pytest.raises(ConfigError, match="is 4; each rank needs a GPU, and CuPy finds 2 "):
        nccl_of(fake_module(2, EmulatedNccl(print)), 0, 4)


def test_a_cupy_without_nccl_is_refused():
    with pytest.raises(ConfigError, match=r"NCCL, which this CuPy .*install nvidia-nccl-cu12"):
        nccl_of(fake_module(2, SimpleNamespace(available=False)), 0, 2)


def test_a_rank_takes_its_gpu():
    nccl = EmulatedNccl(print)
    cupy = fake_module(2, nccl)
    assert nccl_of(cupy, 1, 2) is nccl
    assert cupy.used == [1]
