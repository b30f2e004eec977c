"""Lanes: a process reads the rows of a step that are its own, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.util.text import describe_error
from nsa_models.lm.data import Row
from nsa_models.lm.model import IGNORED
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Rows


class Unreadable(InvalidInput):
    """A process cannot read its rows, and all processes know it."""


class Lanes:
    """The rows that one process reads: row i of every step comes from lane i of the data.

    The lanes are as many as ``recipe.batch``, so they do not depend on the number of processes, and
    neither do the rows of a step. Context and tensor parallel ranks read the same rows.

    Args:
        rows: The rows of the data.
        recipe: The training options.
        world: The processes.

    Raises:
        InvalidInput: Rows do not divide over processes, or the data has no document.
    """

    def __init__(self, rows: Rows, recipe: Recipe, world: World) -> None:
        self._world = world
        rank, ranks = world.place_in("dp"), world.ranks_of("dp")
        self._parts = [
            {
                number: rows.lane(number, recipe.batch)
                for number in range(recipe.batch)[recipe.rows_of(rank, part, ranks)]
            }
            for part in range(recipe.accumulate)
        ]
        self._before = self._own_positions()

    def step(self) -> tuple[list[list[Row]], int]:
        """Read this process's rows of a step.

        Returns:
            The rows of each accumulated part, and the number of targets of the step over all
            processes.

        Raises:
            Unreadable: One of several processes cannot read a document. All processes raise this
                together, and all positions are as before.
            InvalidInput, OSError: The only process cannot read a document; likewise.
        """
        self._before, error = self._own_positions(), ""
        parts: list[list[Row]] = []
        try:
            parts = [[next(lane) for lane in part.values()] for part in self._parts]
        except (InvalidInput, OSError) as reason:
            if self._world.size == 1:
                self.undo()
                raise
            error = str(reason)
        targets = sum(len(r.targets) - r.targets.count(IGNORED) for part in parts for r in part)
        # Counted once by each process that reads the rows.
        counted, failed = self._world.sum_on_host(targets, bool(error))
        if failed:
            self.undo()
            errors = self._world.collect(error)
            rank = next(rank for rank, text in enumerate(errors) if text)
            raise Unreadable(f"process {rank} of {self._world.size}: {errors[rank]}")
        return parts, counted * self._world.ranks_of("dp") // self._world.size

    def undo(self) -> None:
        """Move back to the positions before the last :meth:`step`."""
        self._move(self._before)

    def state(self) -> list[dict[str, int]]:
        """Return the position of each lane of all processes; every process must call this."""
        positions: dict[int, dict[str, int]] = {}
        for own in self._world.collect(self._own_positions()):
            positions |= own
        return [positions[number] for number in sorted(positions)]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the positions of :meth:`state`, of any number of processes.

        Raises:
            InvalidInput: These are not the positions of such rows in as many lanes.
        """
        try:
            self._move(dict(enumerate(state)))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the position in the data is not one of these rows: {describe_error(error)}"
            ) from error

    def _own_positions(self) -> dict[int, dict[str, int]]:
        return {number: lane.state_dict() for part in self._parts for number, lane in part.items()}

    def _move(self, positions: Mapping[int, Mapping[str, Any]]) -> None:
        for part in self._parts:
            for number, lane in part.items():
                lane.load_state_dict(positions[number])
