"""Processes and their ports, read from /proc."""

from __future__ import annotations

import ipaddress
import os
import time
from pathlib import Path

LISTEN = "0A"


def _status(process_id: int) -> tuple[int, str] | None:
    """(parent, state) or None when there is no such process."""
    try:
        state, parent = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(parent), state


def descendants(process_id: int) -> list[int]:
    """Children, their children, and so on."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := _status(int(name))) is not None:
            parents[int(name)] = status[0]
    found = [process_id]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def alive(process_ids: list[int], wait_s: float = 10.0) -> list[int]:
    """Those that still run after at most wait_s (a zombie does not)."""
    deadline = time.monotonic() + wait_s
    while left := [p for p in process_ids if (status := _status(p)) is not None and status[1] != "Z"]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def listening_addresses(process_ids: list[int]) -> set[str]:
    """Addresses on which these processes accept TCP connections."""
    inodes = {target for p in process_ids for target in _sockets(p)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.add(_address(fields[1].split(":")[0]))
    return found


def _sockets(process_id: int) -> list[str]:
    folder = f"/proc/{process_id}/fd"
    targets = []
    try:
        for name in os.listdir(folder):
            targets.append(os.readlink(f"{folder}/{name}"))
    except FileNotFoundError:  # the process or the file was closed while we looked
        pass
    return targets


def _address(digits: str) -> str:
    """The kernel writes addresses as 32-bit words in the machine's byte order."""
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
