"""Several clients of one daemon, each a process that demands and releases resident pages.

Decides when they begin and what is said of the processor meanwhile: how much of all cores was in
use, by anybody, and how much of that by daemon and clients.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

import prefetchd
from tests.sidecar_bench import Process

_CLIENT = "import sys; from tests.sidecar_many import client; client(sys.argv[1], int(sys.argv[2]))"
_BUSY = 0.95
"""Of the cores: beyond that the processor is what there is no more of."""
_OTHERS_MAX = 0.3


@dataclass(frozen=True)
class Load:
    """`each_core`: share in use, by anybody; `daemon`, `clients`: in use, as a number of cores."""

    count: int
    rate: float
    each_core: tuple[float, ...]
    daemon: float
    clients: float
    rounds: int

    @property
    def others(self) -> float:
        return max(0.0, sum(self.each_core) - self.daemon - self.clients)

    def __str__(self) -> str:
        seconds = self.rounds / self.rate
        ends = [1e6 * used * seconds / self.rounds for used in (self.daemon, self.clients)]
        return (
            f"{self.count} clients: {self.rate:.0f} rounds/s, n {self.rounds}; cores in use "
            f"{' + '.join(f'{core:.2f}' for core in self.each_core)}: daemon {self.daemon:.2f} "
            f"({ends[0]:.1f} us a round), clients {self.clients:.2f} ({ends[1]:.1f} us a round), "
            f"others {self.others:.2f}"
        )

    @property
    def verdict(self) -> str:
        cores = len(self.each_core)
        shares = f"daemon {self.daemon:.2f}, clients {self.clients:.2f} of {cores} cores"
        if self.others > _OTHERS_MAX:
            return f"no verdict: others use {self.others:.2f} cores; measure on a quiet machine"
        if sum(self.each_core) >= _BUSY * cores:
            return f"CPU-BOUND ({shares})"
        if self.daemon >= _BUSY:
            return f"CPU-BOUND by the daemon's one thread ({shares})"
        return f"not CPU-bound ({shares})"


def client(address: str, count: int) -> None:
    from tests.sidecar_rounds import demand

    with prefetchd.connect(address) as kv:
        once = demand(kv)
        for _ in range(200):
            once()
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(count):
            once()
        print("done", flush=True)
        sys.stdin.readline()


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def many(daemon: Process, clients: int, count: int) -> Load:
    """`count` rounds of each client, all at once."""
    command = [sys.executable, "-c", _CLIENT, daemon.address, str(count)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(clients)
    ]
    watched = [psutil.Process(one.pid) for one in (daemon.running, *running)]
    _say(running, "")
    before = [_used(one) for one in watched]
    psutil.cpu_percent(percpu=True)
    start_ns = time.perf_counter_ns()
    _say(running, "go\n")
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    each_core = tuple(percent / 100 for percent in psutil.cpu_percent(percpu=True))
    used = [_used(one) - was for one, was in zip(watched, before, strict=True)]
    for one in running:
        one.communicate("end\n")
    rounds = clients * count
    ends = (used[0] / seconds, sum(used[1:]) / seconds)
    return Load(clients, rounds / seconds, each_core, *ends, rounds)


def _say(running: list[subprocess.Popen[str]], words: str) -> None:
    """To all, then wait for a line of each."""
    for one in running:
        assert one.stdin is not None
        one.stdin.write(words)
        one.stdin.flush()
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline(), "a client has failed"
