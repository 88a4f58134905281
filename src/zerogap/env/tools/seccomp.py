"""The system calls that sandboxed code may make: a Linux seccomp filter, built here and installed for good.

Everything not listed fails with EPERM: processes and threads, sockets, signals to anybody, writing to the file system,
namespaces, limits, ptrace. Runs inside the sandbox, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# Reading files (importing modules), memory, the clock, own signal handlers, identity. Not fcntl: it can send signals.
_ALLOWED_X86_64 = {
    "read": 0,
    "write": 1,
    "open": 2,
    "close": 3,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "access": 21,
    "sched_yield": 24,
    "mremap": 25,
    "madvise": 28,
    "nanosleep": 35,
    "getpid": 39,
    "exit": 60,
    "uname": 63,
    "getcwd": 79,
    "readlink": 89,
    "gettimeofday": 96,
    "getrusage": 98,
    "times": 100,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "sigaltstack": 131,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "getdents64": 217,
    "restart_syscall": 219,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "openat": 257,
    "newfstatat": 262,
    "readlinkat": 267,
    "faccessat": 269,
    "getrandom": 318,
    "statx": 332,
    "faccessat2": 439,
}
_ALLOWED_AARCH64 = {
    "getcwd": 17,
    "faccessat": 48,
    "openat": 56,
    "close": 57,
    "getdents64": 61,
    "lseek": 62,
    "read": 63,
    "write": 64,
    "pread64": 67,
    "readlinkat": 78,
    "newfstatat": 79,
    "fstat": 80,
    "exit": 93,
    "exit_group": 94,
    "futex": 98,
    "nanosleep": 101,
    "clock_gettime": 113,
    "clock_getres": 114,
    "clock_nanosleep": 115,
    "sched_getaffinity": 123,
    "sched_yield": 124,
    "restart_syscall": 128,
    "sigaltstack": 132,
    "rt_sigaction": 134,
    "rt_sigprocmask": 135,
    "rt_sigreturn": 139,
    "times": 153,
    "uname": 160,
    "getrusage": 165,
    "gettimeofday": 169,
    "getpid": 172,
    "getppid": 173,
    "getuid": 174,
    "geteuid": 175,
    "getgid": 176,
    "getegid": 177,
    "gettid": 178,
    "brk": 214,
    "munmap": 215,
    "mremap": 216,
    "mmap": 222,
    "mprotect": 226,
    "madvise": 233,
    "getrandom": 278,
    "statx": 291,
    "faccessat2": 439,
}
# By platform.machine(): the kernel's AUDIT_ARCH number and the calls.
TABLES = {"x86_64": (0xC000003E, _ALLOWED_X86_64), "aarch64": (0xC00000B7, _ALLOWED_AARCH64)}

_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # in struct seccomp_data
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def install() -> None:
    """Bind this process to the list, irrevocably. Raises OSError where the kernel has no seccomp filters."""
    architecture, allowed = TABLES[platform.machine()]
    program = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_IF_EQUAL, architecture, if_true=1),
        _instruction(_RETURN, _KILL),  # another calling convention has other numbers
        _instruction(_LOAD_WORD, _NUMBER_OFFSET),
    ]
    for number in allowed.values():
        program += [_instruction(_JUMP_IF_EQUAL, number, if_false=1), _instruction(_RETURN, _ALLOW)]
    program.append(_instruction(_RETURN, _EPERM))
    instructions = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(instructions)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header),
    ):
        if prctl(*arguments, zero, zero):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
