"""Visitors of the demo: images that must equal those generated alone, stops, visitors who leave, and the memory of the page.

    OMP_NUM_THREADS=1 python benchmarks/visitors.py --visitors 8 --requests 40 -o figures.json
    OMP_NUM_THREADS=1 python benchmarks/visitors.py --visitors 8 --minutes 60 -o soak.json

starts `app.py` and ends it. `--address URL --pid N` visits a page that runs already. Each visitor has a gradio_client of its
own. Of ten requests, about two are stopped, or their visitor hangs up; a fifth of the others streams previews.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image
from serving import RunResult, SoakRequest, digest, find_wrong, make_requests, measure_mib

_MANY = 100_000  # requests of a run by minutes: never all of them
_SAMPLE_SECONDS = 1.0


@dataclass
class VisitResult(RunResult):
    """What visits measured.

    Attributes:
        stopped, left: number of requests.
        mib: memory of the page and its child processes, a sample per second.
    """

    stopped: int = 0
    left: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the figures; of memory, its growth from the second to the last quarter of the run, in MiB."""
        quarter = max(1, len(self.mib) // 4)
        second, last = self.mib[quarter : 2 * quarter] or self.mib, self.mib[-quarter:]
        growth = statistics.median(last) - statistics.median(second) if self.mib else 0.0
        memory = {"most": max(self.mib, default=0.0), "end": self.mib[-1] if self.mib else 0.0, "growth": growth}
        return {**asdict(self), "mib": {name: round(value, 1) for name, value in memory.items()}}


@contextmanager
def start_app(*options: str) -> Iterator[tuple[int, str]]:
    """Run `app.py`; yields its process id and address, and ends it with SIGTERM."""
    port = 20_000 + os.getpid() % 10_000
    app = Path(__file__).resolve().parents[1] / "app.py"
    command = [sys.executable, str(app), "--port", str(port), *options]
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        found = next((match[1] for line in page.stdout if (match := re.search(r"runs at (\S+)", line))), None)
        if found is None:
            raise RuntimeError(f"app.py ended with {page.wait()}")
        yield page.pid, found
    finally:
        page.send_signal(signal.SIGTERM)
        page.wait(120)


def run_visitors(
    address: str, process: int, requests: list[SoakRequest], visitors: int, method: str, minutes: float | None = None
) -> tuple[VisitResult, list[dict[str, Any]]]:
    """Visit a page. Returns figures, and a record of each answer.

    Args:
        process: id of the page's process. requests: shared out among the visitors; after `minutes`, no more are begun.
    """
    result, records = VisitResult(), list[dict[str, Any]]()
    started = time.perf_counter()
    deadline = started + 60 * minutes if minutes else float("inf")
    threads = [
        threading.Thread(target=_visit, args=(address, requests[k::visitors], method, deadline, records), daemon=True)
        for k in range(visitors)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        result.mib.append(measure_mib(process))
        time.sleep(_SAMPLE_SECONDS)
    result.seconds = time.perf_counter() - started
    result.count(records)
    result.stopped, result.left = (sum(kind in record for record in records) for kind in ("stopped", "left"))
    return result, records


def _visit(address: str, requests: list[SoakRequest], method: str, deadline: float, records: list[dict[str, Any]]) -> None:
    """Send requests one after the other, by one client."""
    import gradio_client

    with tempfile.TemporaryDirectory() as folder:
        client = gradio_client.Client(address, verbose=False, download_files=folder, analytics_enabled=False)
        for request in requests:
            if time.perf_counter() > deadline:
                return
            try:
                found = _ask(client, address, request, method)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            records.append({"number": request.number, **found})


def _ask(client: Any, address: str, request: SoakRequest, method: str) -> dict[str, Any]:
    started = time.perf_counter()
    if request.leave_after is not None and request.number % 2:
        hang_up(address, request, method)
        return {"left": True}
    name = "/stream" if request.stream else "/generate"
    job = client.submit(request.prompt, method=method, seed=request.seed, api_name=name)
    if request.leave_after is not None:
        time.sleep(request.leave_after)
        job.cancel()
        return {"stopped": True}
    files, _ = job.result()
    seconds = time.perf_counter() - started
    with Image.open(files[0], formats=["PNG"]) as image:
        found = digest(image)
    Path(files[0]).unlink()
    return {"seconds": seconds, "image": found}


def hang_up(address: str, request: SoakRequest, method: str) -> None:
    """Start a job as a caller of its own, listen for `leave_after` seconds, and close the connection."""
    place = urlsplit(address)
    arguments = [request.prompt, method, request.seed, *[None] * 5, 1, 1]
    ask = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    ask.request("POST", "/gradio_api/call/generate", json.dumps({"data": arguments}), {"Content-Type": "application/json"})
    number = json.load(ask.getresponse())["event_id"]
    ask.close()
    listen = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    listen.request("GET", f"/gradio_api/call/generate/{number}")
    answer = listen.getresponse()
    time.sleep(request.leave_after or 0)
    answer.close()
    listen.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--method", default="gumbel")
    parser.add_argument("--visitors", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40, help="of each visitor")
    parser.add_argument("--minutes", type=float, help="instead of a number of requests")
    parser.add_argument("--different", type=int, default=40, help="number of different images")
    parser.add_argument("--address", help="of a page that runs already; with --pid")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument(
        "--app-option", action="append", default=[], help="further option of app.py, as --app-option=--concurrency=2"
    )
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if (options.address is None) != (options.pid is None):
        parser.error("--address and --pid belong together")
    prompts = [line for line in (Path(__file__).parent / "eval_prompts.txt").read_text().splitlines() if line][:20]
    count = _MANY if options.minutes else options.visitors * options.requests
    requests = make_requests(prompts, count, options.different, cancelled=0.2)
    visit = (requests, options.visitors, options.method, options.minutes)
    if options.address:
        result, records = run_visitors(options.address, options.pid, *visit)
    else:
        with start_app("--model", options.model, *options.app_option) as (process, address):
            result, records = run_visitors(address, process, *visit)
    import torch

    from vargen import open_pipeline

    pipe = open_pipeline(options.model, device="auto", torch_dtype=torch.float32)
    result.wrong = find_wrong(records, requests, pipe, options.method)
    print(json.dumps(result.summary(), indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result.summary(), indent=1) + "\n")
    if result.wrong or result.errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
