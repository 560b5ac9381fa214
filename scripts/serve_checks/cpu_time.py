"""The CPU time of this process and of all that it started, by the work that they do. From /proc.

Threads of a server are told apart by their names (`mie.base.threads.start_thread`), and processes
of Chromium by their types.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
TICK = 1 / os.sysconf("SC_CLK_TCK")
WAIT = "server: mie-engine waits for a CPU"
"""The time in which the engine's thread could run, and another one had the CPU."""
IDLE = "idle"
OTHERS = "everything else on the machine"


def cpu_seconds(server: int) -> dict[str, float]:
    """Return the seconds that were used until now, by name. ``server`` is a process of a server."""
    found: dict[str, float] = defaultdict(float)
    for process in _family(os.getpid()):
        try:
            if process == server:
                for name, seconds in _threads(process):
                    found[name] += seconds
            else:
                found[_name(process, server)] += _seconds(process)
        except OSError:  # it has ended meanwhile
            continue
    line = (PROC / "stat").read_text().partition("\n")[0]
    user, nice, system, idle, waits, *interrupts = (int(each) * TICK for each in line.split()[1:9])
    found[IDLE] = idle + waits
    busy = user + nice + system + sum(interrupts)
    found[OTHERS] = busy - sum(
        seconds for name, seconds in found.items() if name not in (WAIT, IDLE)
    )
    return found


def _fields(process: int) -> list[str]:
    """Return the fields of a process from its state, the third field, on."""
    return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()


def _seconds(process: int) -> float:
    user, system = _fields(process)[11:13]
    return (int(user) + int(system)) * TICK


def _family(first: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    parents = {}
    for path in PROC.iterdir():
        if path.name.isdecimal():
            try:
                parents[int(path.name)] = int(_fields(int(path.name))[1])
            except OSError:
                continue
    family = {first}
    while True:
        yield from family
        family = {process for process, parent in parents.items() if parent in family}
        if not family:
            return


def _threads(server: int) -> Iterator[tuple[str, float]]:
    for task in (PROC / str(server) / "task").iterdir():
        runs, waits, _ = map(int, (task / "schedstat").read_text().split())
        name = (task / "comm").read_text().strip()
        if int(task.name) == server:
            name = "event loop"
        elif not name.startswith("mie-"):
            name = "other threads"
        yield f"server: {name}", runs / 1e9
        if name == "mie-engine":
            yield WAIT, waits / 1e9


def _name(process: int, server: int) -> str:
    # Chromium's zygote writes the options of its children with spaces between them.
    words = (PROC / str(process) / "cmdline").read_bytes().decode().replace("\0", " ").split()
    if process == os.getpid():
        return "clients"
    if int(_fields(process)[1]) == server:
        is_follower = any("mie.page.follow" in word for word in words)
        return "server: process that replays" if is_follower else "server: other processes"
    if "chromium" not in "".join(words[:1]):  # none: it has ended
        return "playwright"
    kinds = [word.partition("=")[2] for word in words if word.startswith("--type=")]
    service = [word for word in words if word.startswith("--utility-sub-type=")]
    kind = kinds[0] if kinds else "browser"
    return f"chromium: {service[0].partition('=')[2].partition('.')[0] if service else kind}"
