"""Several processes of one gloo group on this machine, which run the same function and return its results."""

from __future__ import annotations

import importlib
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist


class Ranks:
    """A group of processes. Starting one takes seconds, so tests share it.

    world  number of processes
    """

    def __init__(self, world: int = 2):
        self.folder = tempfile.TemporaryDirectory()
        context = get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, world, str(Path(self.folder.name) / "store")), daemon=True
            )
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable, *args: object, seconds: float = 600.0) -> list:
        """``function(*args)`` in every process, and the results in order of ranks.

        function  a function of a module that the processes can import

        Raises RuntimeError with the traceback of a process that failed, and TimeoutError after ``seconds``.
        """
        for connection in self.connections:
            connection.send((function.__module__, function.__qualname__, args))
        answers = [self.answer(connection, seconds) for connection in self.connections]
        for failed, value in answers:
            if failed:
                raise RuntimeError(value)
        return [value for _, value in answers]

    def answer(self, connection: Connection, seconds: float) -> tuple[bool, object]:
        if not connection.poll(seconds):
            self.close()
            raise TimeoutError(f"no answer within {seconds:.0f} s; the processes are ended")
        return connection.recv()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(connection: Connection, rank: int, world: int, store: str) -> None:
    """Answer requests in a process of the group, until the other end closes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        try:
            module, name, args = connection.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            connection.send((False, getattr(importlib.import_module(module), name)(*args)))
        except Exception:
            connection.send((True, traceback.format_exc()))
