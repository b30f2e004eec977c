"""The files of a long run: one that cannot be written loses neither the table nor the exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nsa_cli import output
from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import write_somewhere


class ResultFiles:
    """Files that a command writes after its work and before it prints its table.

    The files come first, because a reader of the table may close the output.
    """

    def __init__(self) -> None:
        self.written: list[Path] = []
        self._errors: list[str] = []

    def write(self, path: Path | None, write: Callable[[Path], object], keep: bool = False) -> None:
        """Write a file, or remember why it could not be written.

        Args:
            path: The file; None writes nothing.
            write: Writes to the path that it gets.
            keep: If the file cannot be written, write it to the temporary folder instead.
        """
        if path is None:
            return
        try:
            write(path)
            self.written.append(path)
        except (OSError, InvalidInput) as error:  # InvalidInput: the file exists by now
            elsewhere = write_somewhere(path, write) if keep else None
            place = "" if elsewhere is None else f"\n  the result is kept in {elsewhere}"
            self._errors.append(f"{error}{place}")

    def write_json(self, path: Path | None, text: str, force: bool) -> None:
        """Write the document of --json to its file, or print it if ``path`` is STDOUT."""
        if path == output.STDOUT:
            print(text, end="")
        else:
            self.write(path, lambda file: output.write_atomic(file, text, force), keep=True)

    def exit_code(self, code: int) -> int:
        """Return ``code``, or end the command if a file could not be written.

        The message names each such file. The exit code is ``code``, because a failed check matters
        more, or 5 if ``code`` is 0.
        """
        if self._errors:
            output.end(code or output.UNWRITTEN, "\n".join(self._errors))
        return code
