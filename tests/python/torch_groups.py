"""Process groups of torch for tests: gloo over files, without ports or names."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

import ep


@contextlib.contextmanager
def gloo(comm: ep.Communicator, file: str, seconds: float = 60.0) -> Iterator[Any]:
    """The default process group, over a file that all ranks name; destroyed at the end."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(file, comm.num_ranks),
        rank=comm.rank,
        world_size=comm.num_ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
