"""Checks of a model with its real weights: are the tokens those of plain loops, and how many passes does each method take?

Each check is a `Finding`. What does not fit the time is reduced, and what cannot be checked is said, with the reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from vargen.bench.compare import Comparison, MethodResult, compare_methods, open_decoder
from vargen.bench.passes import describe_dtype, open_benchmark_model
from vargen.decoding import DEFAULT_METHOD, PRESETS, Progress, Sampling, Tree
from vargen.in_place.own_generate import NotCheckedError, generate_both
from vargen.models.transformers.supported import Janus
from vargen.pipelines.language_model import LanguageModelPipeline
from vargen.pipelines.seeds import resolve_seeds
from vargen.values import one_line
from vargen.verify.whole_sequence import compute_pass_logits, compute_whole_logits, denoise_without_cache, feed

LOGIT_TOLERANCE, TIE = 1e-3, 1e-4  # of the largest logit: differences of float32 passes; margins that rounding decides
_FEWEST_TOKENS, _KNOWN_TOKENS, _WIDTH = 16, 64, 16
_SMALL_TREE = (-1, 0, 0, 1, 2, 3, 4)  # parents: two branches of three tokens
_GREEDY_IMAGES, _PLAIN_BLOCKS = 4, 3
_FORCED = -1e8  # logits below are of tokens that cannot occur

Result = Literal["equal", "tie", "different", "measured", "not checked", "failed"]


@dataclass
class Finding:
    """The result of a check.

    Attributes:
        result: "tie" is a first difference between tokens whose logits are equal within rounding.
        promised: whether vargen promises equality, as it does in float32 and int8.
        figures: plain values for JSON.
    """

    name: str
    result: Result
    text: str
    promised: bool = False
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_failure(self) -> bool:
        return self.result == "failed" or (self.promised and self.result == "different")


class ModelCheck:
    """The checks of an opened pipeline, which `run` runs one after the other.

    Args:
        subjects: prompts, or classes. minutes: limit, by estimates from measured passes.

    Attributes:
        findings, notes: what was found; what was reduced or left out.
        milliseconds: of a pass, by its number of tokens per image.
        comparison: of methods for images. methods: their results, or those of methods for video.
        frames: of the first video by each method, uint8 `[F, Y, X, 3]`.
    """

    def __init__(self, pipe: Any, subjects: Sequence[Any], seed: int = 0, minutes: float = 10.0):
        self.pipe, self.subjects, self.seed = pipe, list(subjects), seed
        self.end = time.monotonic() + 60 * minutes
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.milliseconds: dict[int, float] = {}
        self.comparison: Comparison | None = None
        self.methods: list[MethodResult] = []
        self.frames: dict[str, Any] = {}
        is_text = isinstance(pipe, LanguageModelPipeline)
        self.dtype = str(pipe.transformer.dtype).removeprefix("torch.") if is_text else describe_dtype(pipe.transformer)
        self.is_promised = self.dtype in ("float32", "int8")
        self.size = pipe.num_tokens if pipe.fps is None else int(pipe.setting("num_blocks"))
        self.unit = "tokens" if pipe.fps is None else "blocks"
        self.unit_seconds = 0.0  # of a token or block by the baseline

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Run all checks. Errors of one are its finding.

        Args:
            progress: called with the percentage that is done, and 100; each check counts as much as another.
        """
        if self.pipe.fps is None:
            self._encode()
        parts = self._list_parts()
        for number, (name, check) in enumerate(parts.items()):
            self._show = partial(_show_part, progress, number, len(parts))
            self._show(0, 1)
            try:
                finding = check()
            except NotCheckedError as error:
                finding = Finding("", "not checked", str(error))
            except torch.OutOfMemoryError:
                finding = Finding("", "not checked", "the device has too little memory")
            except Exception as error:
                finding = Finding("", "failed", f"{type(error).__name__}: {one_line(error)}")
            finding.name = name
            self.findings.append(finding)

    def _list_parts(self) -> dict[str, Callable[[], Finding]]:
        """Return the checks by name; passes come first, because estimates need them."""
        if self.pipe.fps is not None:
            plain = {"plain loop without a cache": self._check_plain_video}
            return {"milliseconds per pass": self._time_video, **plain, "methods": self._run_videos}
        parts: dict[str, Callable[[], Finding]] = {"milliseconds per pass": self._time_passes}
        if isinstance(self.pipe, LanguageModelPipeline) and self.pipe.language_model.has_generate:
            parts["greedy tokens and generate"] = self._check_generate
        else:
            parts["greedy tokens and one pass without a cache"] = self._check_whole
        if self.pipe.paradigm == "next-token":
            parts["chains and trees"] = self._check_chain_and_tree
        parts["int8"] = self._compare_int8
        parts["methods"] = self._compare_methods
        if self.pipe.paradigm == "next-token":
            parts["gumbel and ar"] = self._check_gumbel
        return parts

    def _plan(self, name: str, share: float, most: int, units: float | None = None) -> tuple[int, int]:
        """Return the number of images or videos, and of tokens or blocks of each, that fit in a share of the time left.

        Args:
            units: number of tokens or blocks by the baseline that take as long as an image or video here. Default: its own.
        """
        if not self.unit_seconds:
            raise NotCheckedError("passes could not be timed")
        one = self.unit_seconds * (self.size if units is None else units)
        fits = max(0.0, self.end - time.monotonic()) * share / one
        if fits >= most:
            return most, self.size
        if fits >= 1:
            self.notes.append(f"{name}: {int(fits)} of {most} prompts or classes, because of --minutes")
            return int(fits), self.size
        size, least = int(fits * self.size), 1 if self.unit == "blocks" else min(_FEWEST_TOKENS, self.size)
        if size < least:
            raise NotCheckedError(f"{name}: an image or video takes about {one:.0f} s, more than is left of --minutes")
        self.notes.append(f"{name}: the first {size} of {self.size} {self.unit} of one prompt or class, because of --minutes")
        return 1, size

    def _core_methods(self) -> dict[str, Any]:
        """Return the core presets that the model can run, the baseline first; the others become notes."""
        found, missing = {}, dict[str, list[str]]()
        for known in self.pipe.list_methods():
            preset, reason = PRESETS[known.name], known.unsupported_reason
            if preset.experimental or preset.name == DEFAULT_METHOD:
                continue
            if reason is None:
                found[preset.name] = preset
            else:
                missing.setdefault(one_line(reason), []).append(preset.name)
        self.notes += [f"{', '.join(names)}: {reason}" for reason, names in missing.items()]
        return found

    # -- images ------------------------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        self.decoder = open_decoder(self.pipe)
        given = {"class_labels": self.subjects} if self.pipe.is_class_conditional else {"prompt": self.subjects}
        self.condition = self.pipe.encode_condition(**given)[0]
        generators = [torch.Generator().manual_seed(self.seed + number) for number in range(len(self.subjects))]
        self.seeds = resolve_seeds(generators, len(generators)).noise_seeds

    def _decode(self, number: int, method: str, size: int, greedy: bool = False) -> Tensor:
        """Generate the first `size` tokens `[1, size]` of an image."""
        decoder = type(self.decoder)(self.decoder.model, Sampling(temperature=0), self.decoder.paradigm)
        rows, seed = self.condition.select_rows(slice(number, number + 1)), self.seeds[number : number + 1]
        stop = (lambda progress: int(progress.length.min()) < size) if size < self.size else None
        return (decoder if greedy else self.decoder).decode(rows, seed, method, callback=stop).tokens[:, :size]

    def _time_passes(self) -> Finding:
        methods = ("ar", f"gumbel:window={_WIDTH}") if self.pipe.paradigm == "next-token" else ("plain",)
        for method in methods:
            for _ in range(2):  # the first is a warm-up
                times: list[float] = []
                stats = self.decoder.decode(
                    self.condition.select_rows(slice(0, 1)), self.seeds[:1], method, callback=partial(_note_time, times)
                ).stats
            if stats.by_scale:
                self.milliseconds = {each["tokens"]: 1e3 * each["seconds"] for each in stats.by_scale}
                self.unit_seconds = stats.seconds / self.size
            else:
                steps = [later - earlier for earlier, later in pairwise(times)] or [stats.seconds]
                self.milliseconds[max(stats.passes_by_width)] = 1e3 * statistics.median(steps)
                self.unit_seconds = 1e-3 * self.milliseconds.get(1, 1e3 * stats.seconds)
        text = ", ".join(f"{value:.2f} ms for {width}" for width, value in self.milliseconds.items())
        return Finding("", "measured", f"by tokens of a pass, in the loop, one image: {text}")

    def _judge_greedy(self, differences: list[dict[str, Any]], images: int, size: int, what: str) -> Finding:
        """Return the finding of compared greedy tokens, from the first difference of each image that differs."""
        head = f"{images - len(differences)} of {images} images equal, {size} tokens each; {what}"
        figures = {"images": images, "tokens": size, "differences": differences}
        if not differences:
            return Finding("", "equal", head, self.is_promised, figures)
        real = [each for each in differences if each["margin"] is None or each["margin"] > TIE * each["largest"]]
        first = (real or differences)[0]
        margin = "unknown" if first["margin"] is None else f"{first['margin']:.2g}, largest logit {first['largest']:.3g}"
        text = f"{head}. Image {first['image']}, position {first['position']}: token {first['found']} instead of "
        text += f"{first['expected']}, logit margin {margin}"
        return Finding("", "different" if real else "tie", text, self.is_promised, figures)

    def _check_whole(self) -> Finding:
        images, size = self._plan("greedy tokens", 0.25, min(_GREEDY_IMAGES, len(self.subjects)))
        method, differences = "plain" if self.decoder.paradigm == "next-scale" else "gumbel", []
        for number in range(images):
            tokens = self._decode(number, method, size, greedy=True)
            logits = compute_whole_logits(self.decoder.model, self.condition.select_rows(slice(number, number + 1)), tokens)
            if (found := _first_difference(number, logits.argmax(-1)[0], tokens[0], logits[0])) is not None:
                differences.append(found)
        return self._judge_greedy(differences, images, size, f"{method}, and argmax of one pass over all tokens")

    def _check_generate(self) -> Finding:
        units = 3.0 * self.size
        if not isinstance(self.pipe.language_model, Janus):  # its calls cannot be shorter
            begun, short = time.monotonic(), min(_FEWEST_TOKENS, self.size)
            generate_both(self.pipe, self.subjects[0], short)
            units = (time.monotonic() - begun) / self.unit_seconds * self.size / short
        images, size = self._plan("greedy tokens", 0.3, min(_GREEDY_IMAGES, len(self.subjects)), units)
        differences = []
        for number in range(images):
            own, enabled = generate_both(self.pipe, self.subjects[number], size)
            if (found := _first_difference(number, own, enabled)) is None:
                continue
            differences.append(found)
            known = own[: found["position"] + 1][None].to(self.decoder.model.device)
            used = torch.cat([known[0].cpu(), enabled[found["position"]][None]])
            if 0 <= int(used.min()) <= int(used.max()) < self.pipe.vocab_size:
                rows = self.condition.select_rows(slice(number, number + 1))
                logits = compute_whole_logits(self.decoder.model, rows, known)[0, -1]
                found |= _margin(logits, found["expected"], found["found"])
        return self._judge_greedy(differences, images, size, "generate of the model, and vargen.enable with gumbel")

    @torch.no_grad()
    def _check_chain_and_tree(self) -> Finding:
        """Compare passes over a chain and a small tree with passes over one token at a time."""
        model, rows = self.decoder.model, self.condition.select_rows(slice(0, 1))
        tokens = self._decode(0, "ar", min(self.size, _KNOWN_TOKENS))
        base = tokens.shape[1] // 2
        width = min(_WIDTH, tokens.shape[1] - base)
        fed, other = tokens[:, base : base + width], (tokens[:, base + 1 : base + 4] + 1) % model.vocab
        state, _ = model.start(rows, _KNOWN_TOKENS)
        feed(model, state, tokens[:, :base])
        start = torch.full((1,), base, device=tokens.device)
        singles = feed(model, state, fed, 1)
        model.rollback(state, start)
        branch = feed(model, state, torch.cat([fed[:, :1], other], 1), 1)
        model.rollback(state, start)
        chain = model.forward(fed, state, Tree.make_chain(width - 1, tokens.device)).logits
        shape = Tree.from_parents(_SMALL_TREE, tokens.device)
        nodes = torch.stack([fed[0, 1:4], other[0]], 1).flatten()[None]
        tree = model.forward(torch.cat([fed[:, :1], nodes], 1), state, shape).logits
        expected = torch.cat([singles[:, :1], torch.stack([singles[:, 1:4], branch[:, 1:4]], 2).flatten(1, 2)], 1)
        found = {f"chain of {width}": _compare_logits(chain, singles), "tree of 7": _compare_logits(tree, expected)}
        texts = [f"{name}: largest difference {each['difference']:.2g}, argmax equal at {each['same']} of {each['of']}"
                 for name, each in found.items()]  # fmt: skip
        is_equal = all(each["difference"] <= LOGIT_TOLERANCE * each["largest"] for each in found.values())
        text = "; ".join(texts) + f"; largest logit {found['tree of 7']['largest']:.3g}"
        return Finding("", "equal" if is_equal else "different", text, self.is_promised, found)

    @torch.no_grad()
    def _compare_int8(self) -> Finding:
        if isinstance(self.pipe, LanguageModelPipeline):
            raise NotCheckedError("models of transformers are quantized by quantization_config, which this command leaves out")
        if self.dtype == "int8":
            raise NotCheckedError("the model is stored in int8")
        if time.monotonic() > self.end:
            raise NotCheckedError("no time was left of --minutes")
        rows, size = self.condition.select_rows(slice(0, 1)), self.size
        if self.pipe.paradigm == "next-token":
            size = min(size, 4 * _KNOWN_TOKENS)
        tokens = self._decode(0, self.pipe.baseline, size)
        own = compute_pass_logits(self.decoder.model, rows, tokens)
        model = self.decoder.model
        dtype = torch.float32 if model.device.type == "cpu" else self.pipe.transformer.dtype  # of what is not a product
        try:
            small = open_benchmark_model(str(self.pipe.folder), dtype, model.device, "int8")
        except (ValueError, TypeError) as error:
            raise NotCheckedError(one_line(error)) from error
        found = compute_pass_logits(small.pipe.decoding_model(model.guidance), rows, tokens)
        kl = torch.nn.functional.kl_div(found.log_softmax(-1), own.log_softmax(-1), reduction="none", log_target=True)
        figures = {"tokens": size, "same_argmax": float((own.argmax(-1) == found.argmax(-1)).float().mean()),
                   "mean_kl": float(kl.sum(-1).mean())}  # fmt: skip
        text = f"same argmax as {self.dtype} at {100 * figures['same_argmax']:.1f} % of {size} positions, "
        return Finding("", "measured", text + f"mean KL divergence {figures['mean_kl']:.4f} nats", figures=figures)

    def _compare_methods(self) -> Finding:
        methods = self._core_methods()
        repeats = 2 if self.decoder.device.type == "cuda" else 1  # parts are timed by another run
        images, size = self._plan("methods", 0.85, len(self.subjects), self.size * len(methods) * repeats)
        whole = None if size == self.size else size
        self.comparison = compare_methods(
            self.pipe, self.subjects[:images], methods, seed=self.seed, progress=self._show, num_tokens=whole
        )
        self.methods = self.comparison.methods
        best = max(self.methods, key=lambda each: each.tokens_per_pass)
        text = f"{images} images of {size} tokens by each of {len(methods)} methods; most tokens per pass: {best.name}"
        return Finding("", "measured", text)

    def _check_gumbel(self) -> Finding:
        if self.comparison is None:
            raise NotCheckedError("the methods were not compared")
        own, found = (self.comparison.tokens[name] for name in ("ar", "gumbel"))
        same = (own == found).all(1)
        text = f"{int(same.sum())} of {len(same)} sampled images equal, {own.shape[1]} tokens each"
        figures: dict[str, Any] = {"images": len(same), "equal": int(same.sum()), "tokens": own.shape[1]}
        if not same.all():
            number = int((~same).nonzero()[0])
            first = _first_difference(number, own[number], found[number])
            figures["first"] = first
            text += "" if first is None else f". First difference: image {number}, position {first['position']}"
        return Finding("", "equal" if same.all() else "different", text, self.is_promised, figures)

    # -- video -------------------------------------------------------------------------------------------------------------

    def _stream(self, number: int, method: Any, blocks: int) -> Any:
        generator = torch.Generator().manual_seed(self.seed + number)
        options = {"num_blocks": blocks, "generator": generator, "image": False}
        return self.pipe.stream(self.subjects[number], accelerator=method, **options)

    def _time_video(self) -> Finding:
        for _ in range(2):  # the first is a warm-up
            stream = self._stream(0, "target", 1)
            list(stream)
        passes, frames = stream.stats.passes["target"], stream.model.block_shape[0]
        self.unit_seconds = stream.stats.seconds * (passes + 1) / passes  # later blocks also update the cache
        self.milliseconds = {frames: 1e3 * stream.stats.seconds / passes}
        text = f"{self.milliseconds[frames]:.1f} ms for a block of {frames} latent frames, with its share of the decoder"
        return Finding("", "measured", text)

    def _check_plain_video(self) -> Finding:
        most = min(_PLAIN_BLOCKS, self.size)
        _, blocks = self._plan("plain loop", 0.3, 1, 3 * most)
        blocks = min(blocks, most)
        stream = self._stream(0, "target", blocks)
        latents = torch.cat([block.latents for block in stream])[None]
        plain = denoise_without_cache(stream.model, stream.condition, stream.seed, blocks).to(latents)
        difference, largest = float((latents - plain).abs().max()), float(plain.abs().max())
        text = f"target, {blocks} blocks: largest difference of latents {difference:.2g}, largest value {largest:.3g}"
        figures = {"blocks": blocks, "difference": difference, "largest": largest}
        is_equal = difference <= LOGIT_TOLERANCE * largest
        return Finding("", "equal" if is_equal else "different", text, self.is_promised, figures)

    def _run_videos(self) -> Finding:
        methods = self._core_methods()
        videos, blocks = self._plan("methods", 0.85, len(self.subjects), self.size * len(methods))
        for place, (name, method) in enumerate(methods.items()):
            self._show(place, len(methods))
            runs = []
            for number in range(videos):
                stream = self._stream(number, method, blocks)
                made = torch.cat([block.frames.mul(255).round().byte().cpu() for block in stream])
                self.frames.setdefault(name, made.permute(0, 2, 3, 1).numpy())
                runs.append(stream.stats)
            row = MethodResult(name, method.kind, videos, statistics.mean(run.seconds for run in runs))
            row.passes_per_batch = statistics.mean(sum(run.passes.values()) for run in runs)
            self.methods.append(row)
            row.speedup = self.methods[0].seconds_per_image / row.seconds_per_image
        return Finding("", "measured", f"{videos} videos of {blocks} blocks by each of {len(methods)} methods")


def _show_part(progress: Callable[[int, int], None], part: int, parts: int, done: int, total: int) -> None:
    progress(round(100 * (part + done / total) / parts), 100)


def _note_time(times: list[float], progress: Progress) -> bool:
    times.append(time.perf_counter())
    return progress.step <= _WIDTH


def _first_difference(image: int, expected: Tensor, found: Tensor, logits: Tensor | None = None) -> dict[str, Any] | None:
    """Return where tokens `[N]` of an image first differ, with the margin by the expected token's logits `[N, V]`."""
    length = min(len(expected), len(found))
    places = (expected[:length].cpu() != found[:length].cpu()).nonzero()
    if not len(places):
        return None
    place = int(places[0])
    own, other = int(expected[place]), int(found[place])
    margin = {"margin": None, "largest": None} if logits is None else _margin(logits[place], own, other)
    return {"image": image, "position": place, "expected": own, "found": other, **margin}


def _margin(logits: Tensor, expected: int, found: int) -> dict[str, float]:
    """Return by how much the logit of the expected token `[V]` exceeds that of the one found, and the largest logit."""
    return {"margin": float(logits[expected] - logits[found]), "largest": float(logits[logits > _FORCED].abs().max())}


def _compare_logits(found: Tensor, expected: Tensor) -> dict[str, Any]:
    used = expected > _FORCED
    return {
        "difference": float((found - expected)[used].abs().max()), "largest": float(expected[used].abs().max()),
        "same": int((found.argmax(-1) == expected.argmax(-1)).sum()), "of": expected.shape[1],
    }  # fmt: skip
