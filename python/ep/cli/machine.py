"""What a Linux machine offers: each function answers (state, text[, what would do]) for doctor."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import secrets
import socket
from pathlib import Path

_LEAST_KERNEL = (5, 4)
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")  # what the kernels' leaves are built for
_GIB = 1 << 30
_LEAST_BYTES = _GIB  # of memory or address space; what a small buffer and torch take
_FILES_BASE = 40  # open files of a process with torch, before any rank
_FILES_PER_PEER = 2  # a socket and a process descriptor

Answer = tuple[str, ...]


def platform_answer() -> Answer:
    text = f"{platform.system()} on {platform.machine()}"
    if platform.system() != "Linux":
        return "missing", text, "use a Linux machine"
    return "ok", text


def kernel_answer() -> Answer:
    release = platform.release()
    version = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    if version < _LEAST_KERNEL:
        return "missing", f"{release}; sealed memfds need 5.4", "boot Linux 5.4 or newer"
    return "ok", release


def cores_answer() -> Answer:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count()
    flags = set(cpu_field("flags").split())
    if not flags:
        simd = "no x86 flags: the portable kernels"
    elif flags.issuperset(_AVX512):
        simd = "AVX-512"
    elif flags.issuperset(("avx2", "f16c")):
        simd = "AVX2"
    else:
        simd = "no AVX2: the portable kernels, which are slower"
    name = cpu_field("model name")
    return "ok", f"{usable} of {present} usable, {simd}{', ' if name else ''}{name}"


def cpu_field(field: str) -> str:
    """The first value of `field` in /proc/cpuinfo, or nothing."""
    match = re.search(rf"^{field}\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else ""


def memory_answer() -> Answer:
    text = Path("/proc/meminfo").read_text()
    free = int(text.partition("MemAvailable:")[2].split()[0]) * 1024  # given in kB
    limit = _cgroup_limit()
    room = free if limit is None else min(free, limit)
    shown = f"{free / _GIB:.1f} GiB available"
    if limit is not None:
        shown += f", {limit / _GIB:.1f} GiB of it within this control group"
    if room < _LEAST_BYTES:
        return "missing", shown, "free memory or raise the control group's limit: 1 GiB is needed"
    return "ok", f"{shown}; windows are shared memory and count as the process's own"


def _cgroup_limit() -> int | None:
    """Bytes that this process's version-2 control group may still take; None: no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def address_space_answer() -> Answer:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return "ok", "unlimited (ulimit -v)"
    text = (
        f"{soft / _GIB:.1f} GiB (ulimit -v); a buffer reserves its worst case of every rank, "
        "arena_bytes= sets less"
    )
    return ("note", text) if soft >= _LEAST_BYTES else ("missing", text, "ulimit -v unlimited")


def locked_memory_answer() -> Answer:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return "note", f"{shown} (ulimit -l); ranks of one node lock none"


def open_files_answer() -> Answer:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "ok", "unlimited (ulimit -n)"
    peers = (soft - _FILES_BASE) // _FILES_PER_PEER
    text = f"{soft} (ulimit -n): enough for {max(0, peers)} peers in processes of their own"
    if peers < 1:
        shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return "missing", text, f"ulimit -n 1024 (the hard limit is {shown})"
    return "ok", text


def memfd_answer() -> Answer:
    file = os.memfd_create("ep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(file)
    return "ok", "made and sealed one"


def unix_sockets_answer() -> Answer:
    name = "\0ep-doctor-" + secrets.token_hex(8)  # a zero byte in front: in no file system
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(name)
        listener.listen(1)
        client.connect(name)
    return "ok", "an abstract name took a connection"


def proc_answer() -> Answer:
    for path in ("/proc/self/stat", "/proc/self/ns/net", "/proc/sys/kernel/random/boot_id"):
        Path(path).stat()
    return "ok", "readable; it tells which ranks share a node"
