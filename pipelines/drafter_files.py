"""Folders of trained drafters: found by name, checked against the model that they draft for before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vargen.assets
from vargen.files import expand_user
from vargen.models.described import read_object
from vargen.pipelines.component_files import check_component
from vargen.pipelines.families import Family
from vargen.pipelines.parts import check_parts
from vargen.pipelines.trust import check_no_code
from vargen.values import short_repr


def list_packaged_drafters(family: Family) -> dict[str, Path]:
    """Folders of the drafters that come with the library, by name, such as `"emoji/eagle"`."""
    root = Path(vargen.assets.__file__).parent
    found = [config.parent for name in family.drafters for config in sorted(root.rglob(f"{name}/config.json"))]
    return {folder.relative_to(root).as_posix(): folder for folder in found}


def resolve_drafter(name: Any, family: Family, transformer: Mapping[str, Any]) -> tuple[str, Path]:
    """The component that a trained drafter is, such as `"eagle"`, and its folder.

    Args:
        name: a packaged drafter, or a folder. transformer: configuration of the model that it is to draft for.

    Raises:
        ValueError: for an unknown name or folder, one that holds code, no trained drafter, or one of another width, vocabulary
            or grid; before a weight is read.
    """
    packaged = list_packaged_drafters(family)
    folder = packaged.get(str(name)) or expand_user(name, "drafter")
    if not os.path.isdir(folder):
        known, given = ", ".join(packaged) or "none is packaged", short_repr(str(name))
        raise ValueError(f"drafter must be a folder with a trained drafter, or a packaged one ({known}), got {given}")
    kind = read_object(folder / "config.json").get("_class_name")
    component = next((each for each in family.drafters if family.networks[each].__name__ == kind), None)
    if component is None:
        classes = ", ".join(family.networks[each].__name__ for each in family.drafters) or "none"
        raise ValueError(f"{folder / 'config.json'} describes a {kind!r}; drafters of a {family.pipeline} are {classes}")
    check_no_code(folder)
    config = check_component(folder, family.networks[component])
    try:
        check_parts(family, {"transformer": transformer, component: config})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return component, folder
