"""Old names that keep working, with a `DeprecationWarning`, for one release after a rename."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

RENAMED_FIELDS: dict[str, Mapping[str, str]] = {}  # by class name, for readers of method strings and of old run folders


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=stacklevel)


def renamed_attribute(old: str, new: str) -> property:
    """Return a read-only property that forwards to the attribute's new name."""

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(read)


def renamed_attributes(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose attributes were renamed: the old names can be read."""

    def decorate(cls: type[T]) -> type[T]:
        for old, new in new_names.items():
            setattr(cls, old, renamed_attribute(old, new))
        return cls

    return decorate


def renamed_keywords(**new_names: str) -> Callable[[F], F]:
    """Decorate a function whose keyword arguments were renamed: it accepts the old names, too."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def renaming(*args: Any, **kwargs: Any) -> Any:
            for old in new_names.keys() & kwargs.keys():
                warn_renamed(f"{old}=", f"{new_names[old]}=")
                kwargs[new_names[old]] = kwargs.pop(old)  # also if both are given, as by `dataclasses.replace`
            return function(*args, **kwargs)

        return cast(F, renaming)

    return decorate


def renamed_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose fields were renamed: old names are accepted as constructor keywords, and can be read.

    Adds them to `RENAMED_FIELDS`, too.
    """

    def decorate(cls: type[T]) -> type[T]:
        setattr(cls, "__init__", renamed_keywords(**new_names)(cls.__init__))  # noqa: B010
        RENAMED_FIELDS[cls.__name__] = new_names
        return renamed_attributes(**new_names)(cls)

    return decorate


def find_renamed(module: str, name: str, renamed: Mapping[str, str], removed: Mapping[str, str]) -> Any:
    """Body of a module's `__getattr__`.

    Args:
        renamed: new name of each old name: of this module, or `module:name`.
        removed: what to use instead of each name that was removed.
    """
    if name in renamed:
        home, _, new = renamed[name].rpartition(":")
        warn_renamed(f"{module}.{name}", new, stacklevel=4)
        return getattr(importlib.import_module(home or module), new)
    reason = f": {removed[name]}" if name in removed else ""
    raise AttributeError(f"module {module!r} has no attribute {name!r}{reason}")
