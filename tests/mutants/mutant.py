"""What a mutant is: a fault, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class MutantError(ValueError):
    """A mutant does not fit the code; the message names it."""


@dataclass(frozen=True)
class Mutant:
    """A fault to set in the code.

    Attributes:
        name: short, unique.
        breaks: what is wrong then, in words that do not depend on the present code.
        file: to change, relative to the repository.
        old: text that occurs exactly once in the file. new: replaces it.
        tests: files or node ids of pytest, one of which must fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> bytes:
        """Return the content of the file with the fault.

        Raises:
            MutantError: if the file is missing, does not contain the old text exactly once, or is no longer valid Python.
        """
        path = root / self.file
        if not path.is_file():
            raise MutantError(f"mutant {self.name}: {self.file} does not exist")
        source = path.read_bytes().decode("utf-8")
        if (count := source.count(self.old)) != 1:
            raise MutantError(f"mutant {self.name}: its old text must occur once in {self.file}, and occurs {count} times")
        changed = source.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise MutantError(f"mutant {self.name}: {self.file} would not be valid Python: {error}") from error
        return changed.encode("utf-8")
