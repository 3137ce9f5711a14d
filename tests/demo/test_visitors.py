"""benchmarks/load.py: every answer is compared, visitors who leave are counted, and memory is sampled."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from load import Request, find_wrong, run_clients, visit_page

from vargen.demo.image_service import ImageService

pytest.importorskip("psutil")


def test_visitors_are_counted_and_their_images_compared(address: str, service: ImageService, tmp_path: Path) -> None:
    asked = [Request(0, "a cat", 3), Request(1, "a dog", 4, 0.0), Request(2, "a cat", 3, 0.0)]
    asked += [Request(3, "a cat", 5, stream=True), Request(4, "x" * 400, 1)]
    connect = partial(visit_page, address, "gumbel", str(tmp_path))
    result, records = run_clients(os.getpid(), asked, 2, connect)
    assert (result.answered, result.left, len(result.errors)) == (2, 2, 1)
    assert "at most 300" in result.errors[0] and 0 < result.p50 <= result.p99 and result.mib[0] > 1
    assert find_wrong(records, asked, service.pipe, "ar") == []
    swapped: list[dict[str, Any]] = [{**each, "number": 3 - each["number"]} for each in records if "image" in each]
    assert sorted(find_wrong(swapped, asked, service.pipe, "ar")) == [0, 3], "another image is noticed"
