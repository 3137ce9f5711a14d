"""A short soak of the command, by clients some of whom leave; the long one is in benchmarks/load.py."""

from __future__ import annotations

import http.client
import json
import signal
import urllib.request
from functools import partial
from pathlib import Path

import load
import pytest
from tiny_models import class_pipeline

from vargen import open_pipeline

pytest.importorskip("psutil")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-class"
    class_pipeline().save_pretrained(path)
    return path


def test_no_image_is_wrong_or_lost_when_clients_leave(folder: Path) -> None:
    requests = load.make_requests([str(number) for number in range(5)], 24, 8)
    options = ["--model", str(folder), "--accelerator", "gumbel", "--slots", "3", "--dtype", "float32", "--max-waiting", "10"]
    with load.start_service(*options) as (server, address):
        ask = partial(load.ask_service, address)
        result, records = load.run_clients(server.pid, requests, 4, lambda: ask)
        with urllib.request.urlopen(f"{address}/v1/models", timeout=30) as answer:
            assert json.load(answer)["data"][0]["id"] == "tiny-class"
        # A request that runs when the server is told to end is finished.
        last = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        body = json.dumps({"prompt": "1", "n": 10, "stream": True})
        last.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
        answer = last.getresponse()  # its head, which is sent before the first image is
        server.send_signal(signal.SIGTERM)
        assert answer.read().count(b"image_generation.completed\ndata") == 10
        last.close()
    assert not result.errors and result.answered + result.left == len(requests)
    assert sorted(record["number"] for record in records) == list(range(len(requests)))
    assert load.find_wrong(records, requests, open_pipeline(folder), "gumbel") == []
