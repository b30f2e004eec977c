"""The tasks of a worker: the process of one rank that uses the GPU.

A worker runs tasks until its pipe closes. A failure of a collective leaves the other ranks waiting,
so the ranks' main processes replace all workers after a failed task (nsa_bench.parallel.workers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nsa_bench.environment import machine
from nsa_bench.gate import Gate
from nsa_bench.parallel.call import (
    Division,
    Place,
    Times,
    divided_layer,
    measure_call,
    training_call,
)
from nsa_bench.parallel.equality import Referee
from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.shapes import Shape
from nsa_bench.timing import FAILED
from nsa_core.util.text import describe_error

OUT_OF_MEMORY = "out of memory"


@dataclasses.dataclass(frozen=True)
class Setup:
    """The start parameters of a worker; every field can be pickled.

    Attributes:
        rank: Its rank.
        settings: The settings of the run.
        port: Port of the store at which the workers meet.
        name: Name of this set of workers in the store.
    """

    rank: int
    settings: ParallelSettings
    port: int
    name: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a task on one rank, or the reason why there is none.

    Attributes:
        value: The result.
        reason: Why there is no result.
        follows: Whether this rank was ended because another one failed.
    """

    value: Any = None
    reason: str = ""
    follows: bool = False


class Worker:
    """The state of a worker between tasks."""

    def __init__(self, setup: Setup) -> None:
        self.rank, self.settings = setup.rank, setup.settings
        self.device = torch.device(self.settings.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", setup.rank)
            torch.cuda.set_device(self.device)
        self._setup = setup
        self._referees: dict[tuple[Shape, torch.dtype], Referee] = {}

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks. The first use joins the other workers, and waits for them."""
        ranks, cuda = self.settings.ranks, self.device.type == "cuda"
        store = PrefixStore(self._setup.name, TCPStore("localhost", self._setup.port, None, False))
        limit = datetime.timedelta(seconds=self.settings.time_limit_s + 600)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=self.rank,
            world_size=ranks,
            timeout=limit,
            device_id=self.device if cuda else None,
        )
        return init_device_mesh(self.device.type, (ranks,))

    def place(self, ranks: int) -> Place:
        """Return where this rank runs; the others take part if ``ranks`` is above 1."""
        return Place(self.rank, 1 if ranks == 1 else self.settings.ranks, self.device)

    def referee(self, shape: Shape, dtype: torch.dtype) -> Referee:
        """Return the referee of divisions of a shape in a dtype."""
        if (shape, dtype) not in self._referees:
            referee = Referee(self.settings, shape, dtype, self.device)
            self._referees[shape, dtype] = referee
        return self._referees[shape, dtype]

    def free(self) -> None:
        """Release the memory of the last task."""
        self.place(1).free()


@dataclasses.dataclass(frozen=True)
class Facts:
    """Return the facts of the rank's machine and device for the result file."""

    def __call__(self, worker: Worker) -> dict[str, Any]:
        """Run the task."""
        return machine(str(worker.device))


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judge a division in a dtype; returns a Gate."""

    shape: Shape
    dtype: str
    division: Division

    def __call__(self, worker: Worker) -> Gate:
        """Run the task."""
        referee = worker.referee(self.shape, getattr(torch, self.dtype))
        return referee.judge(self.division, worker.place(self.division.ranks), worker.mesh)


@dataclasses.dataclass(frozen=True)
class Measure:
    """Time a division at a length; returns Times."""

    shape: Shape
    dtype: str
    division: Division
    length: int

    def __call__(self, worker: Worker) -> Times:
        """Run the task."""
        place, dtype = worker.place(self.division.ranks), getattr(torch, self.dtype)
        mesh = None if self.division.ranks == 1 else worker.mesh
        layer = divided_layer(worker.settings, self.shape, dtype, self.division, mesh)
        rows = self.length // self.division.ranks
        call = training_call(layer.to(worker.device), rows, dtype, place, worker.settings.seed)
        return measure_call(call, place, worker.settings)


@dataclasses.dataclass(frozen=True)
class Try:
    """Run forward and backward once, to see whether they fit; returns None."""

    shape: Shape
    dtype: str
    division: Division
    length: int

    def __call__(self, worker: Worker) -> None:
        """Run the task."""
        place, dtype = worker.place(self.division.ranks), getattr(torch, self.dtype)
        mesh = None if self.division.ranks == 1 else worker.mesh
        layer = divided_layer(worker.settings, self.shape, dtype, self.division, mesh)
        rows = self.length // self.division.ranks
        place.milliseconds(
            training_call(layer.to(worker.device), rows, dtype, place, worker.settings.seed)
        )


@dataclasses.dataclass(frozen=True)
class Project:
    """Time one rank of a division alone, with stand-ins for the collectives; returns Times.

    Attributes:
        shape, dtype, division, length: As for :class:`Measure`.
        rank: The rank of the division.
    """

    shape: Shape
    dtype: str
    division: Division
    length: int
    rank: int

    def __call__(self, worker: Worker) -> Times:
        """Run the task in a worker without a group."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        ranks, dtype = self.division.ranks, getattr(torch, self.dtype)
        dist.init_process_group("fake", rank=self.rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,))  # no operator of its group runs
            layer = divided_layer(worker.settings, self.shape, dtype, self.division, mesh)
            place = Place(self.rank, 1, worker.device)
            rows = self.length // ranks
            layer = layer.to(worker.device)
            call = training_call(layer, rows, dtype, place, worker.settings.seed)
            return measure_call(call, place, worker.settings, stand_in=True)
        finally:
            dist.destroy_process_group()


def serve(connection: Connection, setup: Setup) -> None:
    """Run in the worker: answer tasks until the pipe closes."""
    torch.set_num_threads(setup.settings.threads)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker: Worker | None = None
        while True:
            task = connection.recv()
            answer = Answer(reason=FAILED)
            try:
                worker = worker or Worker(setup)
                answer = Answer(task(worker))
            except torch.OutOfMemoryError:
                answer = Answer(reason=OUT_OF_MEMORY)
            except Exception as error:  # noqa: BLE001  kernels may raise anything
                answer = Answer(reason=f"{FAILED}: {describe_error(error)}")
            if worker is not None:
                worker.free()
            connection.send(answer)
