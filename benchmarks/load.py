"""Many clients of `vargen serve`, some of whom leave: every image must equal the one generated alone.

OMP_NUM_THREADS=1 python benchmarks/load.py --requests 400 -o figures.json
OMP_NUM_THREADS=1 python benchmarks/load.py --minutes 60 -o soak.json
OMP_NUM_THREADS=1 python benchmarks/load.py --option=--engine=ray --option=--replicas=2
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import io
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Request:
    """After `leave_after` seconds the client goes away; None: it stays."""

    number: int
    prompt: str
    seed: int
    leave_after: float | None = None
    stream: bool = False


Ask = Callable[[Request], dict[str, Any]]


@dataclass
class RunResult:
    """What a run measured.

    Attributes:
        answered, left: number of requests. retries: number of answers with status 429 or 503.
        wrong: numbers of requests whose image is not the one generated alone. errors: messages of requests that failed.
        seconds: from the first request to the last answer. p50, p99: seconds of an answered request, its wait included.
        mib: memory of the server and its children, a sample per second.
    """

    answered: int = 0
    left: int = 0
    retries: int = 0
    wrong: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    mib: list[float] = field(default_factory=list)

    def count(self, records: list[dict[str, Any]], started: float) -> None:
        """Summarize the records of requests."""
        self.seconds = time.perf_counter() - started
        seconds = sorted(record["seconds"] for record in records if "image" in record)
        self.answered, self.left = len(seconds), sum("left" in record for record in records)
        self.retries = sum(record.get("retries", 0) for record in records)
        self.errors = [record["error"] for record in records if "error" in record]
        if seconds:
            self.p50, self.p99 = seconds[len(seconds) // 2], seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]

    def summary(self) -> dict[str, Any]:
        """Return the figures; of memory, the highest, the last, and the growth from the second to the last quarter."""
        quarter = max(1, len(self.mib) // 4)
        second, last = self.mib[quarter : 2 * quarter] or self.mib, self.mib[-quarter:]
        growth = statistics.median(last) - statistics.median(second) if self.mib else 0.0
        memory = {"most": max(self.mib, default=0.0), "end": self.mib[-1] if self.mib else 0.0, "growth": growth}
        rate = {"images_per_second": self.answered / self.seconds if self.seconds else 0.0}
        return {**asdict(self), **rate, "mib": {name: round(value, 1) for name, value in memory.items()}}


def make_requests(prompts: list[str], count: int, different: int, leaving: float = 0.2) -> list[Request]:
    """Return `count` requests for `different` images, of which a fraction leaves and a fifth is streamed."""
    choose, requests = random.Random(count), []
    images = [(prompts[k % len(prompts)], k) for k in range(different)]
    for number in range(count):
        leave_after = choose.uniform(0.02, 2) if choose.random() < leaving else None
        requests.append(Request(number, *choose.choice(images), leave_after, choose.random() < 0.2))
    return requests


def digest(image: Image.Image) -> str:
    return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


def measure_mib(process: int) -> float:
    """Return the memory of a process and its children in MiB."""
    import psutil

    total, found = 0, psutil.Process(process)
    for each in (found, *found.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def find_wrong(records: list[dict[str, Any]], requests: list[Request], pipe: Any, method: str) -> list[int]:
    """Return the numbers of the requests whose image is not the one generated alone."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    alone: dict[tuple[str, int], str] = {}
    subject, wrong = "class_labels" if pipe.is_class_conditional else "prompt", []
    for record in (each for each in records if "image" in each):
        request = requests[record["number"]]
        key = (request.prompt, request.seed)
        if key not in alone:
            own = {subject: int(request.prompt) if pipe.is_class_conditional else request.prompt}
            source = torch.Generator().manual_seed(request.seed)
            alone[key] = digest(pipe(**own, accelerator=method, generator=source).images[0])
        if record["image"] != alone[key]:
            wrong.append(request.number)
    return wrong


@contextmanager
def start(words: list[str], pattern: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; yields it and what `pattern` finds in its output, and ends it with SIGTERM, which must give status 0."""
    server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = next((match[1] for line in server.stdout if (match := re.search(pattern, line))), None)
        if found is None:
            raise RuntimeError(f"the server ended with {server.wait()}")
        yield server, found
        server.terminate()
        if (status := server.wait(120)) != 0:
            raise RuntimeError(f"the server ended with {status}")
    finally:
        server.kill()
        server.wait()


def run_clients(
    server: int,
    requests: list[Request],
    clients: int,
    connect: Callable[[], Ask],
    minutes: float | None = None,
) -> tuple[RunResult, list[dict[str, Any]]]:
    """Send requests from several threads. Returns figures, and a record of each answer.

    Args:
        server: its process. connect: returns what sends a client's requests. minutes: no more requests are begun after them.
    """
    result, records, started = RunResult(), list[dict[str, Any]](), time.perf_counter()

    def run_client(own: list[Request]) -> None:
        ask = connect()
        for request in own:
            if minutes is not None and time.perf_counter() - started > 60 * minutes:
                return
            try:
                found = ask(request)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            records.append({"number": request.number, **found})

    threads = [threading.Thread(target=run_client, args=(requests[k::clients],), daemon=True) for k in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        result.mib.append(measure_mib(server))
        time.sleep(1)
    result.count(records, started)
    return result, records


def start_service(*options: str) -> Any:
    """Run `vargen serve`; yields the process and its address."""
    code = "from vargen.cli.main import main; main()"
    return start(["-c", code, "serve", "--port", "0", "--timeout", "600", *options], r"(http://127\.0\.0\.1:\d+)")


def ask_service(address: str, request: Request) -> dict[str, Any]:
    """Send a request until it is accepted, and return what came back."""
    body = {"prompt": request.prompt, "seed": request.seed, "stream": request.stream}
    retries, started = 0, time.perf_counter()
    while True:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
        try:
            connection.request("POST", "/v1/images/generations", json.dumps(body), {"Content-Type": "application/json"})
            if request.leave_after is not None:
                time.sleep(request.leave_after)
                return {"left": True, "retries": retries}
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status not in (429, 503):
            break
        retries += 1
        time.sleep(float(answer.headers.get("Retry-After", 1)))
    found = {"retries": retries, "seconds": time.perf_counter() - started}
    if answer.status == 200:
        document = json.loads(content.split(b"data: ")[-1] if request.stream else content)
        text = document.get("b64_json") if request.stream else document["data"][0]["b64_json"]
        if text is not None:
            return {**found, "image": digest(Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"]))}
    return {**found, "error": content[-300:].decode("utf-8", "replace")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--method", default="gumbel")
    parser.add_argument("--requests", type=int, default=400, help="of all clients")
    parser.add_argument("--minutes", type=float, help="instead of a number of requests")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--option", action="append", default=[], help="further option of the server, as --option=--slots=4")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    import torch

    from vargen import open_pipeline

    prompts = [line for line in (ROOT / "benchmarks" / "eval_prompts.txt").read_text().splitlines() if line][:20]
    requests = make_requests(prompts, 100_000 if options.minutes else options.requests, 40)
    words = ["--model", options.model, "--accelerator", options.method, "--dtype", "float32", *options.option]
    with start_service(*words) as (server, address):
        ask = partial(ask_service, address)
        result, records = run_clients(server.pid, requests, options.clients, lambda: ask, options.minutes)
    pipe = open_pipeline(options.model, device="auto", torch_dtype=torch.float32)
    result.wrong = find_wrong(records, requests, pipe, options.method)
    print(text := json.dumps(result.summary(), indent=1))
    if options.output is not None:
        options.output.write_text(text + "\n")
    sys.exit(1 if result.wrong or result.errors else 0)


if __name__ == "__main__":
    main()
