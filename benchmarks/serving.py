"""A soak of `vargen serve`: clients that cancel, one that is killed, and images that must equal those generated alone.

    OMP_NUM_THREADS=1 python benchmarks/serving.py --requests 400 --single-requests 80 -o figures.json

Processes of clients use the standard library and Pillow. Each has its own list of requests, and appends a line to its own file
for each answer; requests of a client that was killed go to a new one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import io
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class SoakRequest:
    """A request of the soak. After `leave_after` seconds the client goes away; None: it stays."""

    number: int
    prompt: str
    seed: int
    leave_after: float | None = None
    stream: bool = False


@dataclass
class SoakResult:
    """What a soak measured.

    Attributes:
        answered, cancelled: number of requests. retries: number of answers with status 429 or 503.
        wrong: numbers of requests whose image is not the one generated alone. errors: other answers.
        seconds: from the first request to the last answer.
        p50, p99: seconds of a request that was answered.
        mib: memory of the server after the first 50 requests, at most from then on, and at the end.
        kills: what was killed.
    """

    answered: int = 0
    cancelled: int = 0
    retries: int = 0
    wrong: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    mib: list[float] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        return self.answered / self.seconds


def make_requests(prompts: list[str], count: int, different: int, cancelled: float = 0.1) -> list[SoakRequest]:
    """Return `count` requests for `different` images, a fraction of which is cancelled and a fifth streamed."""
    choose = random.Random(count)
    images = [(prompts[k % len(prompts)], k) for k in range(different)]
    requests = []
    for number in range(count):
        leave_after = choose.uniform(0.02, 2) if choose.random() < cancelled else None
        requests.append(SoakRequest(number, *choose.choice(images), leave_after, choose.random() < 0.2))
    return requests


def digest(image: Image.Image) -> str:
    return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


# -- the client: `python serving.py client PORT REQUESTS RESULTS` -------------------------------------------------------------


def run_client(port: int, requests: Path, results: Path) -> None:
    with results.open("a") as file:
        for line in requests.read_text().splitlines():
            request = SoakRequest(**json.loads(line))
            print(json.dumps({"number": request.number, **ask(port, request)}), file=file, flush=True)


def ask(port: int, request: SoakRequest) -> dict[str, Any]:
    """Send a request until it is accepted, and return what came back."""
    body = {"prompt": request.prompt, "seed": request.seed, "stream": request.stream}
    retries, started = 0, time.perf_counter()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("POST", "/v1/images/generations", json.dumps(body), {"Content-Type": "application/json"})
            if request.leave_after is not None:
                time.sleep(request.leave_after)
                return {"cancelled": True, "retries": retries}
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status not in (429, 503):
            break
        retries += 1
        time.sleep(float(answer.headers.get("Retry-After", 1)))
    found = {"status": answer.status, "retries": retries, "seconds": time.perf_counter() - started}
    if answer.status == 200:
        last = content.split(b"data: ")[-1] if request.stream else content
        document = json.loads(last)
        text = document.get("b64_json") if request.stream else document["data"][0]["b64_json"]
        if text is not None:
            return {**found, "image": digest(Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"]))}
    return {**found, "error": content[-300:].decode("utf-8", "replace")}


# -- the soak ---------------------------------------------------------------------------------------------------------------


@contextmanager
def start_server(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `vargen serve`; yields the process and its port, and ends it with SIGTERM."""
    code = "from vargen.cli.main import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", "--timeout", "600", *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "http://" in line:
                break
        else:
            raise RuntimeError(f"vargen serve ended with {server.wait()}")
        yield server, int(line.partition("127.0.0.1:")[2].partition("/")[0])
        server.terminate()
        if (status := server.wait(120)) != 0:
            raise RuntimeError(f"vargen serve ended with {status}")
    finally:
        server.kill()
        server.wait()


def measure_mib(process: int) -> float:
    """Memory of a process and its children in MiB."""
    import psutil

    found = psutil.Process(process)
    total = 0
    for each in (found, *found.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def run_soak(
    server: int, port: int, requests: list[SoakRequest], clients: int, kill_client: bool = False
) -> tuple[SoakResult, list[dict[str, Any]]]:
    """Send requests from several clients. Returns figures, and a record of each answer."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.jsonl" for number in range(clients)]
        started = time.perf_counter()
        running = [_start_client(port, requests[k::clients], file) for k, file in enumerate(files)]
        result = SoakResult()
        done, warm = 0, min(50, len(requests) // 2)
        while any(client.poll() is None for client in running):
            time.sleep(0.2)
            done = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
            if done >= warm:
                memory = measure_mib(server)
                result.mib = [memory, memory, memory] if not result.mib else [result.mib[0], max(result.mib[1], memory), memory]
            if kill_client and done >= warm and not result.kills and running[0].poll() is None:
                running[0].send_signal(signal.SIGKILL)
                running[0].wait()
                result.kills.append("a client")
                known = {record["number"] for record in _read_records(files[0])}
                left = [request for request in requests[::clients] if request.number not in known]
                running[0] = _start_client(port, left, files[0])
        result.seconds = time.perf_counter() - started
        records = [record for file in files for record in _read_records(file)]
    _summarize(result, records)
    return result, records


def _start_client(port: int, requests: list[SoakRequest], results: Path) -> subprocess.Popen[bytes]:
    listed = results.with_suffix(".requests")
    listed.write_text("\n".join(json.dumps(asdict(request)) for request in requests))
    return subprocess.Popen([sys.executable, __file__, "client", str(port), str(listed), str(results)])


def _read_records(file: Path) -> list[dict[str, Any]]:
    """Read whole lines; the client may have been killed during one."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _summarize(result: SoakResult, records: list[dict[str, Any]]) -> None:
    seconds = sorted(record["seconds"] for record in records if "image" in record)
    result.answered, result.cancelled = len(seconds), sum("cancelled" in record for record in records)
    result.retries = sum(record["retries"] for record in records)
    result.errors = [record["error"] for record in records if "error" in record]
    if seconds:
        result.p50, result.p99 = seconds[len(seconds) // 2], seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def find_wrong(records: list[dict[str, Any]], requests: list[SoakRequest], pipe: Any, method: str) -> list[int]:
    """Return the numbers of the requests whose image is not the one generated alone."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    alone: dict[tuple[str, int], str] = {}
    wrong = []
    subject = "class_labels" if pipe.is_class_conditional else "prompt"
    for record in records:
        request = requests[record["number"]]
        key = (request.prompt, request.seed)
        if "image" not in record:
            continue
        if key not in alone:
            own = {subject: int(request.prompt) if pipe.is_class_conditional else request.prompt}
            source = torch.Generator().manual_seed(request.seed)
            alone[key] = digest(pipe(**own, accelerator=method, generator=source).images[0])
        if record["image"] != alone[key]:
            wrong.append(request.number)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--method", default="gumbel")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--different", type=int, default=40, help="number of different images")
    parser.add_argument("--single-requests", type=int, default=80, help="of the server with one slot")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument(
        "--server-option", action="append", default=[], help="further option of vargen serve, as --server-option=--engine=ray"
    )
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    import torch

    from vargen import open_pipeline

    prompts = [line for line in (Path(__file__).parent / "eval_prompts.txt").read_text().splitlines() if line][:20]
    figures: dict[str, Any] = {}
    pipe = open_pipeline(options.model, device="auto", torch_dtype=torch.float32)
    for slots, count in ((options.slots, options.requests), (1, options.single_requests)):
        requests = make_requests(prompts, count, options.different)
        arguments = ["--model", options.model, "--accelerator", options.method, "--slots", str(slots), "--dtype", "float32"]
        with start_server(*arguments, *options.server_option) as (server, port):
            result, records = run_soak(server.pid, port, requests, options.clients, kill_client=True)
        result.wrong = find_wrong(records, requests, pipe, options.method)
        figures[f"{slots} slots"] = {**asdict(result), "images_per_second": result.images_per_second}
        print(json.dumps(figures[f"{slots} slots"], indent=1), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        run_client(int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
