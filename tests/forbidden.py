"""Python text for a child process that forbids itself io_uring, as containers do; exit 77 if the
machine does not let it."""

from __future__ import annotations

FORBID_URING = """
import ctypes, struct, sys
# If the system call (word 0) is io_uring_setup (425) then EPERM, else allowed: classic BPF.
program = struct.pack(
    "HBBI" * 4,
    0x20, 0, 0, 0, 0x15, 0, 1, 425, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7FFF0000,
)
code = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
NO_NEW_PRIVILEGES, SECCOMP = 38, 22
if prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(SECCOMP, 2, filter, 0, 0):
    sys.exit(77)
"""
