"""OpenAI's client against the service: images, partial images, errors in their shape, and clients that leave."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from served import Gate, generate_alone, serving
from waiting import wait_until

from vargen.decoding import Sampling
from vargen.serving.api import ModelCard, RequestLimits, build_app
from vargen.serving.engine import GenerationThread
from vargen.serving.server import warm_up
from vargen.serving.tasks import ImageTask

KEY = "secret-key"


@pytest.fixture(scope="module")
def generation(text_pipe: Any) -> Iterator[GenerationThread]:
    with GenerationThread(text_pipe, "gumbel", slots=2, max_waiting=4) as made:
        yield made


@pytest.fixture(scope="module")
def card(text_pipe: Any, generation: GenerationThread) -> ModelCard:
    return warm_up(text_pipe, generation, "tiny")


@pytest.fixture(scope="module")
def address(card: ModelCard, generation: GenerationThread) -> Iterator[str]:
    with serving(build_app(card, generation, RequestLimits(images=4, seconds=20), KEY)) as made:
        yield made


def open_client(address: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 30, **options})


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return open_client(address)


def decode(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


def post(address: str, content: bytes, path: str = "/v1/images/generations", **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(address + path, content, {
        "Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers,
    })  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def read_metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def plain(pipe: Any, prompt: str, seed: int, sampling: Sampling | None = None) -> bytes:
    return bytes(generate_alone(pipe, ImageTask(prompt, seed, sampling or Sampling()), "gumbel").tobytes())


def test_images_are_those_of_the_pipeline_with_consecutive_seeds(client: Any, text_pipe: Any) -> None:
    result = client.images.generate(model="tiny", prompt="a red apple", n=3, size="8x8", extra_body={"seed": 7})
    assert [item.seed for item in result.data] == [7, 8, 9] and result.size == "8x8" and result.output_format == "png"
    for item in result.data:
        image = decode(item.b64_json)
        assert image.size == (8, 8) and bytes(image.tobytes()) == plain(text_pipe, "a red apple", item.seed)


def test_a_random_seed_is_returned_and_sampling_options_are_taken(client: Any, text_pipe: Any) -> None:
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    result = client.images.generate(prompt="a dog", extra_body=options)
    [item] = result.data
    assert bytes(decode(item.b64_json).tobytes()) == plain(text_pipe, "a dog", item.seed, Sampling(**options))


def test_fields_of_openai_without_a_meaning_here_are_taken(client: Any) -> None:
    options = {
        "quality": "hd",
        "style": "vivid",
        "user": "me",
        "background": "auto",
        "moderation": "low",
        "extra_body": {"seed": 1},
    }
    assert client.images.generate(prompt="a dog", size="auto", **options).data[0].seed == 1


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_urls_are_unguessable_and_need_no_key(client: Any, kind: str, address: str) -> None:
    result = client.images.generate(prompt="a dog", response_format="url", output_format=kind)
    url = result.data[0].url
    assert url.startswith(f"{address}/images/") and len(url.rpartition("/")[2]) >= 32
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"] == f"image/{kind}"
        assert Image.open(io.BytesIO(answer.read())).format == kind.upper()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/images/other", timeout=30)


def test_partial_images_are_streamed_before_the_final_one(client: Any, text_pipe: Any) -> None:
    stream = client.images.generate(prompt="a dog", stream=True, partial_images=3, n=2, extra_body={"seed": 4})
    events: dict[int, list[Any]] = {0: [], 1: []}
    for event in stream:
        events[event.image_index].append(event)
    for number, own in events.items():
        *partial, final = own
        assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial) and partial
        assert [event.partial_image_index for event in partial] == list(range(len(partial)))
        assert final.type == "image_generation.completed"
        shown = [sum(value > 0 for value in decode(event.b64_json).getchannel("A").tobytes()) for event in partial]
        assert shown == sorted(set(shown)) and shown[-1] < 64
        assert bytes(decode(final.b64_json).tobytes()) == plain(text_pipe, "a dog", 4 + number)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "vargen"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-image-1")


REFUSED = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": " \n"}, 400, "prompt"),
    ({"prompt": "\ud800"}, 400, "prompt"),
    ({"prompt": "x" * 5000}, 400, "prompt"),
    ({"n": 0}, 400, "n"),
    ({"n": 10**30}, 400, "n"),
    ({"n": "2"}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"size": "1024x1024"}, 400, "size"),
    ({"size": [1]}, 400, "size"),
    ({"seed": -2}, 400, "seed"),
    ({"seed": 2**63 - 1, "n": 2}, 400, "seed"),
    ({"model": "dall-e-3"}, 404, "model"),
    ({"model": {}}, 400, "model"),
    ({"guidance": 3}, 400, "guidance"),
    ({"guidance_scale": -1}, 400, "guidance_scale"),
    ({"response_format": "file"}, 400, "response_format"),
    ({"output_format": "gif"}, 400, "output_format"),
    ({"background": "transparent"}, 400, "background"),
    ({"stream": 1}, 400, "stream"),
    ({"stream": True, "response_format": "url"}, 400, "response_format"),
    ({"partial_images": 2}, 400, "partial_images"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_k": 10**9}, 400, "top_k"),
    ({"top_p": 2}, 400, "top_p"),
    ({"min_p": -1}, 400, "min_p"),
]


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED, ids=lambda value: str(value)[:30])
def test_invalid_fields_are_refused_by_name(address: str, fields: dict[str, Any], status: int, param: str) -> None:
    found, body = post(address, json.dumps({"prompt": "a dog", **fields}).encode())
    error = body["error"]
    assert found == status and error["param"] == param and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and param in error["message"].lower()
    assert len(error["message"]) < 300 and "nput should" not in error["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"prompt": NaN}', {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b"[" * 50_000, {}, 400),
        (b'{"prompt": "' + b"x" * 2**20 + b'"}', {}, 413),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, 400),
        (b'{"prompt": "a"}', {"Origin": "http://example.org"}, 403),
        (b'{"prompt": "a"}', {"Authorization": "Bearer wrong"}, 401),
        (b'{"prompt": "a"}', {"Authorization": "B\xe9"}, 401),
    ],
    ids=["cut", "list", "NaN", "latin-1", "deep", "1 MB", "text", "page of another site", "wrong key", "odd key"],
)
def test_bad_bodies_are_refused(address: str, content: bytes, headers: dict[str, str], status: int) -> None:
    found, body = post(address, content, **headers)
    assert found == status and set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("path", "status"), [("/docs", 404), ("/v1/images/generations", 405), ("/v1/nothing", 404)])
def test_unknown_places_answer_in_the_same_shape(address: str, path: str, status: int) -> None:
    request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request, timeout=30)
    assert failed.value.code == status and json.load(failed.value)["error"]["message"]


@pytest.mark.parametrize(("path", "other"), [("/v1/images/edits", "'emoji-var'"), ("/v1/videos", "'emoji-video'")])
def test_what_the_model_cannot_do_names_one_that_can(address: str, path: str, other: str) -> None:
    status, body = post(address, b'{"prompt": "a dog"}', path)
    assert status == 404 and "The model 'tiny' cannot" in body["error"]["message"] and other in body["error"]["message"]


def test_errors_reveal_nothing_about_the_machine(address: str, text_pipe: Any, caplog: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("cannot read /home/me/secret.txt")

    broken = text_pipe.transformer.register_forward_pre_hook(fail)
    status, body = post(address, b'{"prompt": "a dog"}')
    broken.remove()
    assert status == 500 and "secret" not in json.dumps(body) and "secret" in caplog.text
    assert body["error"]["type"] == "server_error"
    status, _ = post(address, b'{"prompt": "a dog"}')
    assert status == 200


def test_a_failure_in_a_stream_is_its_last_event(client: Any, text_pipe: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    broken = text_pipe.transformer.register_forward_pre_hook(fail)
    with pytest.raises(openai.APIError, match="generation failed"):
        list(client.images.generate(prompt="a dog", stream=True))
    broken.remove()


def test_without_the_key_only_health_and_metrics_answer(address: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        open_client(address, api_key="other").models.list()
    with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}
    found = read_metrics(address)
    assert found["vargen_images_total"] > 0 and found["vargen_tokens_per_pass"] > 1
    assert found['vargen_requests_total{endpoint="/v1/images/generations",status="200"}'] > 0
    assert found['vargen_request_seconds_count{endpoint="/v1/images/generations"}'] > 0


def test_a_full_queue_answers_429_with_a_time(address: str, client: Any, gate: Gate, generation: GenerationThread) -> None:
    gate.close()
    before = gate.passes
    streams = [client.images.generate(prompt="a dog", stream=True, n=2, timeout=30, partial_images=1) for _ in range(3)]
    gate.wait_for_pass(before + 1)
    assert read_metrics(address)["vargen_queue_length"] == 4
    with pytest.raises(openai.RateLimitError) as full:
        client.images.generate(prompt="a dog")
    assert int(full.value.response.headers["Retry-After"]) >= 1 and full.value.code == "rate_limit_exceeded"
    gate.open()
    assert all(sum(event.type.endswith("completed") for event in stream) == 2 for stream in streams)


def wait_until_idle(generation: GenerationThread) -> None:
    wait_until(lambda: generation.stats.num_waiting + generation.stats.num_active == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(address: str, gate: Gate, generation: GenerationThread, stream: bool) -> None:
    wait_until_idle(generation)
    gate.close()
    before, images = gate.passes, generation.stats.images
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    body = json.dumps({"prompt": "a dog", "n": 4, "stream": stream})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/images/generations", body, headers)
    gate.wait_for_pass(before + 1)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: generation.stats.num_waiting == 0)
    gate.open()
    wait_until_idle(generation)
    assert gate.passes <= before + 3 and generation.stats.images == images  # prefill, and at most two more


def test_a_request_that_takes_too_long_is_cancelled(card: ModelCard, generation: GenerationThread, gate: Gate) -> None:
    wait_until_idle(generation)
    with serving(build_app(card, generation, RequestLimits(seconds=0.2))) as address:
        gate.close()
        with pytest.raises(openai.APIStatusError) as late:
            open_client(address).images.generate(prompt="a dog")
        assert late.value.status_code == 504 and late.value.code == "timeout"
        with pytest.raises(openai.APIError, match="too long"):
            list(open_client(address).images.generate(prompt="a dog", stream=True))
        gate.open()
        wait_until_idle(generation)
        slow = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30)
        slow.sendall(
            b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert b"408" in slow.recv(4096)
        slow.close()


def test_requests_beyond_the_limit_are_refused(card: ModelCard, generation: GenerationThread, gate: Gate) -> None:
    with serving(build_app(card, generation, RequestLimits(connections=1))) as address:
        gate.close()
        client = open_client(address)
        stream = client.images.generate(prompt="a dog", stream=True, partial_images=1)
        with pytest.raises(openai.InternalServerError, match="Too many requests"):
            client.models.list()
        gate.open()
        assert [event.type for event in stream][-1] == "image_generation.completed"


def test_a_model_of_classes_takes_names_and_numbers(class_pipe: Any) -> None:
    with GenerationThread(class_pipe, "gumbel", slots=2) as generation:
        card = warm_up(class_pipe, generation, "classes")
        with serving(build_app(card, generation)) as address:
            client = open_client(address)
            images = [client.images.generate(prompt=text, extra_body={"seed": 3}).data[0].b64_json for text in ("3", "Kitty")]
            assert images[0] == images[1]
            assert bytes(decode(images[0]).tobytes()) == plain(class_pipe, 3, 3)  # type: ignore[arg-type]
            for text in ("10", "bird", "³"):
                with pytest.raises(openai.BadRequestError, match="number of a class"):
                    client.images.generate(prompt=text)


def test_guidance_is_that_of_the_request(client: Any, text_pipe: Any) -> None:
    for scale in (1.0, 3.5, None):  # without guidance, images need another engine
        [item] = client.images.generate(prompt="a dog", extra_body={"seed": 5, "guidance_scale": scale}).data
        alone = generate_alone(text_pipe, ImageTask("a dog", 5, Sampling()), "gumbel", guidance_scale=scale)
        assert decode(item.b64_json).tobytes() == alone.tobytes()


@pytest.mark.parametrize("given", [-1, None])
def test_a_seed_of_minus_one_is_random(client: Any, given: int | None) -> None:
    seeds = [client.images.generate(prompt="a dog", extra_body={"seed": given}).data[0].seed for _ in range(2)]
    assert seeds[0] != seeds[1] and min(seeds) >= 0


def test_ordinary_clients_are_served(card: ModelCard, generation: GenerationThread) -> None:
    """A look at the address, HEAD, and pages of a site that is allowed; the key is asked for behind the browser's question."""
    with serving(build_app(card, generation, api_key=KEY, allow_origins=["https://example.org"])) as address:
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert json.load(answer)["model"] == "tiny"
        for path in ("/", "/health"):
            with urllib.request.urlopen(urllib.request.Request(address + path, method="HEAD"), timeout=30) as answer:
                assert answer.status == 200 and answer.read() == b""
        headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        question = urllib.request.Request(f"{address}/v1/images/generations", headers=headers, method="OPTIONS")
        with urllib.request.urlopen(question, timeout=30) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "https://example.org"
        assert post(address, b'{"prompt": "a dog"}', Origin="https://example.org")[0] == 200
        assert post(address, b'{"prompt": "a dog"}', Origin="https://example.com")[0] == 403


def test_images_are_inpainted_where_the_mask_is_transparent(scale_pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    side = scale_pipe.image_size
    source = Image.new("RGB", (side, side), (200, 30, 30))
    mask = Image.new("RGBA", (side, side), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, side // 2, side))
    files = []
    for image in (source, mask):
        files.append(io.BytesIO())
        image.save(files[-1], "PNG")
    with ExitStack() as running:
        generation = running.enter_context(GenerationThread(scale_pipe, slots=2))
        app = build_app(warm_up(scale_pipe, generation, "scales"), generation)
        client = open_client(running.enter_context(serving(app)))
        [item] = client.images.edit(image=files[0], mask=files[1], prompt="1", extra_body={"seed": 3}).data
        with pytest.raises(openai.BadRequestError) as failed:
            client.images.edit(image=b"no image", mask=files[1], prompt="1")
        assert failed.value.param == "image"
        client.images.edit(image=files[0], mask=("whole.png", files[0].getvalue()), prompt="1")
        assert "mask_image 'whole.png' regenerates the whole image" in caplog.text
    options = {"image": source, "mask_image": mask, "generator": torch.Generator().manual_seed(3)}
    assert decode(item.b64_json).tobytes() == scale_pipe(class_labels=1, **options).images[0].tobytes()
