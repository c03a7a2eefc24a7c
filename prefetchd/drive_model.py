"""When a modelled drive ends each operation that it is given: queueing, from a profile's numbers.

Decides completion times at submission, first come first served, so that the same calls give the
same times. Knows no clock: times come with the calls, real or virtual. Moves no bytes.

An operation waits for one of the medium's units and holds it for its latency; beside that its
bytes go over the drive's channel, reads and writes each at their rate and in order of their start
(of submission, on a scattered medium). It ends when both are over: alone after latency and
transfer, at depth as fast as the slower of the two allows. A late read (its latency drawn from the
tail) does not hold up the channel.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefetchd.drive_profile import DriveProfile

_DRAWN = 4096  # latencies drawn at a time

Times = NDArray[np.int64]


class DriveModel:
    """One drive. `seed` decides which reads are slow, where the profile has a tail."""

    def __init__(self, profile: DriveProfile, seed: int = 0) -> None:
        self.profile = profile
        ceiling = profile.link_gb_s or float("inf")
        self._read_ns = 1 / min(profile.read_gb_s, ceiling)  # ns per byte
        self._write_ns = 1 / min(profile.write_gb_s, ceiling)
        self._latency_ns = int(profile.read_us * 1e3)
        self._write_latency_ns = int(profile.write_us * 1e3)
        self._behind_ns = int(profile.behind_write_us * 1e3)
        self._units = [0] * profile.units  # when each is free; a heap, unless scattered
        self._channel = [0.0, 0.0]  # when reads, writes have been moved
        self._writing_until_ns = 0
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._tail: Iterator[int] = iter(())  # of latencies drawn ahead
        self._places: Iterator[int] = iter(())  # of units drawn ahead

    def submit(self, lengths: NDArray[np.int64], *, write: bool, now_ns: int) -> Times:
        """When operations of so many bytes each, given at `now_ns` in this order, will end.

        `now_ns` never falls from call to call.
        """
        ends = np.empty(len(lengths), np.int64)
        per_byte = self._write_ns if write else self._read_ns
        units, scattered = self._units, self.profile.scattered
        for place, length in enumerate(lengths.tolist()):
            unit = self._place() if scattered else 0
            start_ns = max(now_ns, units[unit])
            latency_ns = self._latency(start_ns, write=write)
            if scattered:
                units[unit] = start_ns + latency_ns
            else:
                heapq.heapreplace(units, start_ns + latency_ns)
            transfer_ns = length * per_byte
            booked_ns = max(self._channel[write], now_ns if scattered else start_ns) + transfer_ns
            self._channel[write] = booked_ns
            ends[place] = round(max(booked_ns, start_ns + transfer_ns)) + latency_ns
        if write and len(ends):
            self._writing_until_ns = max(self._writing_until_ns, int(ends.max()))
        return ends

    def _latency(self, start_ns: int, *, write: bool) -> int:
        if write:
            return self._write_latency_ns
        latency_ns = self._drawn() if self.profile.read_tail else self._latency_ns
        return latency_ns + self._behind_ns * (start_ns < self._writing_until_ns)

    def _drawn(self) -> int:
        """A latency from the profile's points, by inverting its distribution."""
        for latency_ns in self._tail:
            return latency_ns
        shares, times_us = zip((0.0, self.profile.read_us), *self.profile.read_tail, strict=True)
        drawn = np.interp(self._random.random(_DRAWN), shares, times_us) * 1e3
        self._tail = iter(drawn.astype(np.int64).tolist())
        return self._drawn()

    def _place(self) -> int:
        """Which unit holds what is read next."""
        for unit in self._places:
            return unit
        self._places = iter(self._random.integers(len(self._units), size=_DRAWN).tolist())
        return self._place()
