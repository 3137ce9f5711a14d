"""The endpoints over the real protocol, with gradio_client: results, bad input, and many callers at once."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from vargen.demo.image_service import ImageService
from vargen.demo.jobs import Job

gradio_client = pytest.importorskip("gradio_client")


@pytest.fixture(scope="module")
def client(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gradio_client.Client]:
    folder = tmp_path_factory.mktemp("downloads")
    patient = {"timeout": 300}  # seconds, of which httpx waits five unless told otherwise
    yield gradio_client.Client(
        address, verbose=False, download_files=str(folder), analytics_enabled=False, httpx_kwargs=patient
    )


def test_generate(client: gradio_client.Client, service: ImageService) -> None:
    from PIL import Image

    files, report = client.predict("a red apple", seed=7, num_images=2, api_name="/generate")
    assert report["prompt"] == "a red apple" and report["accelerator"] == "auto" and report["tokens_per_second"] > 0
    assert report["seed"] == 7 and report["stats"]["seeds"] == [7, 8]
    for number, path in enumerate(files):
        with Image.open(path) as image:
            assert image.format == "PNG" and image.size == (16, 16)
            reported = json.loads(image.text["vargen"])
        assert reported["seed"] == 7 + number
    again, _ = client.predict("a red apple", seed=8, api_name="/generate")
    assert Image.open(again[0]).tobytes() == Image.open(files[1]).tobytes(), "a seed is a picture"


def test_methods(client: gradio_client.Client) -> None:
    found = {each["name"]: each for each in client.predict(api_name="/methods")}
    assert found["ar"]["kind"] == "exact" and found["ar"]["reason"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": " "}, "Type a prompt first"),
        ({"prompt": "x" * 301}, "at most 300"),
        ({"prompt": "a", "method": "magic"}, "'magic' is not available"),
        ({"prompt": "a", "num_images": 5}, "The number of images must be a whole number from 1 to 4"),
        ({"prompt": "a", "num_images": 1.5}, "whole number"),
        ({"prompt": "a", "temperature": -1}, "Temperature must be a number from 0 to 2"),
        ({"prompt": "a", "guidance_scale": "much"}, "Guidance must be a number"),
        ({"prompt": "a", "seed": -1}, "The seed must be"),
        ({"prompt": "a", "top_k": 65}, "Top-k must be at most 64"),
        ({"prompt": ["a"]}, "The prompt must be text"),
    ],
)
def test_bad_input_is_reported_in_words(client: gradio_client.Client, given: dict, message: str) -> None:
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        client.predict(**given, api_name="/generate")
    assert message in str(caught.value) and "Traceback" not in str(caught.value)


def test_other_endpoints_are_not_offered(client: gradio_client.Client) -> None:
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/generate", "/methods"}


@pytest.mark.parametrize("path", ["/etc/passwd", "pyproject.toml", "../../etc/passwd"])
def test_files_of_the_machine_are_not_served(address: str, repo_root: Path, path: str) -> None:
    wanted = path if path.startswith(("/", "..")) else str(repo_root / path)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}gradio_api/file={urllib.parse.quote(wanted)}")
    assert caught.value.code in (403, 404)


@pytest.fixture
def runs(service: ImageService, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The drawings that the endpoints started, in order."""
    started: list[Job] = []
    start = service.start

    def start_and_tell(*given: Any, **options: Any) -> Job:
        started.append(start(*given, **options))
        return started[-1]

    monkeypatch.setattr(service, "start", start_and_tell)
    return started


PROGRAM = """
import sys, gradio_client
gradio_client.Client(sys.argv[1], verbose=False, httpx_kwargs={"timeout": 300}).predict("a red apple", api_name="/generate")
"""


def stopped(runs: list[Job], give_up: Callable[[], Any]) -> None:
    """A drawing is under way, its caller gives up, and it ends there; no other one is begun."""
    wait_until(lambda: runs and runs[0].counts)
    give_up()
    wait_until(runs[0].done.is_set)
    generated = runs[0].result()
    assert generated.stopped and runs[0].tokens < runs[0].total
    assert len(runs) == 1


def test_a_cancelled_job_ends_its_generation(
    client: gradio_client.Client, runs: list[Job], slow: Callable[[float], None]
) -> None:
    slow(0.5)  # half a minute a picture
    job = client.submit("a red apple", api_name="/generate")
    stopped(runs, job.cancel)
    slow(0.0)
    assert client.predict("a blue ball", seed=1, api_name="/generate")[1]["seed"] == 1, "the place in the queue is free again"


def test_a_killed_client_ends_its_generation(address: str, runs: list[Job], slow: Callable[[float], None]) -> None:
    slow(0.5)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, address]) as program:
        try:
            stopped(runs, program.kill)
        finally:
            program.kill()


def test_a_plain_http_caller_that_hangs_up_ends_its_generation(
    address: str, runs: list[Job], slow: Callable[[float], None]
) -> None:
    slow(0.5)
    place = urllib.parse.urlsplit(address)
    ask = http.client.HTTPConnection(place.hostname, place.port)
    given = json.dumps({"data": ["a red apple", "ar", *[None] * 6, 1, 1]})
    ask.request("POST", "/gradio_api/call/generate", given, {"Content-Type": "application/json"})
    number = json.load(ask.getresponse())["event_id"]
    listen = http.client.HTTPConnection(place.hostname, place.port)
    listen.request("GET", f"/gradio_api/call/generate/{number}")
    answer = listen.getresponse()

    def hang_up() -> None:
        answer.close()
        listen.close()

    stopped(runs, hang_up)
    ask.close()


def test_a_caller_that_listens_sees_how_far_it_is(client: gradio_client.Client, slow: Callable[[float], None]) -> None:
    slow(0.5)
    job = client.submit("a red apple", seed=7, api_name="/generate")
    wait_until(lambda: len(job.outputs()) >= 2)
    slow(0.0)
    files, report = job.result()
    *before, last = job.outputs()
    assert len(files) == 1 and report["seed"] == 7 and last[1] == report
    assert before and all(each[0] == [] for each in before)
    generated = [each[1]["tokens_generated"] for each in before]
    assert generated == sorted(generated) and 0 <= generated[0] < 64 and generated[-1] <= 64 and before[0][1]["tokens"] == 64
