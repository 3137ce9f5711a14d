"""How our loop runs a call of `generate` for each kind of model: its ids as an image vocabulary, prompts as rows, results.

Shape suffixes: B sequences, P prompt tokens, T new tokens, N tokens of the grid, V ids of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Sampling
from vargen.in_place.generate_calls import GenerateCall, PassThroughError
from vargen.models.transformers.base import ImageLanguageModel, PromptRows
from vargen.models.transformers.supported import GLMImage, Janus, PreviewDrafter, grid_offsets
from vargen.values import one_line

_FAR = 1e4  # an id that is no code is like no other token
Allowed = tuple[int, ...]


@dataclass(frozen=True)
class ImagePlan:
    """A call as our loop runs it.

    Attributes:
        description: of the model, with the ids that the call may sample as its vocabulary.
        rows: prompts, and those of the unconditional rows if `guidance_scale` is not 1.
        schedule, allowed: for calls with `prefix_allowed_tokens_fn`, the ids that it is expected to allow at each position, and
            the function.
        whole_sequence: whether prompts are part of the result.
    """

    call: GenerateCall
    description: ImageLanguageModel
    rows: PromptRows
    schedule: tuple[Allowed, ...] = ()
    allowed: AllowedIds | None = None
    whole_sequence: bool = True

    @property
    def sampling(self) -> Sampling:
        """Sampling options; a top-k beyond the vocabulary keeps all ids."""
        found = self.call.sampling
        return replace(found, top_k=None) if (found.top_k or 0) >= self.description.vocab else found


class CallDescription(ImageLanguageModel):
    """A described model whose vocabulary and grid are those of one call.

    Args:
        ids: int64 `[V]`, the ids that the call may sample; None: the first `vocab` ids.
        forced: int64 `[N]`, indices in `ids` of positions with only one id; -1 elsewhere.
        offsets: int64 `[3, N]`, positions of the tokens after the prompt, for models with three axes of positions.
    """

    def __init__(
        self, known: ImageLanguageModel, grid: tuple[int, int], vocab: int,
        ids: Tensor | None = None, forced: Tensor | None = None, offsets: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(known.model)
        self._call = grid, vocab, ids, forced, offsets
        self.class_name, self.body, self.grid, self.vocab = known.class_name, known.body, grid, vocab
        self.ids, self.forced, self._offsets, self._known = ids, forced, offsets, known
        self.codebook = _arrange_codebook(known, vocab, ids)

    def with_model(self, known: ImageLanguageModel) -> CallDescription:
        """Return the same for another model, which drafts for this one."""
        return CallDescription(known, *self._call)

    def positions(self, start: Tensor, index: Tensor) -> Tensor:
        if self._offsets is None:
            return super().positions(start, index)
        return start[None, :, None] + self._offsets[:, index.clamp(max=self._offsets.shape[1] - 1)]

    def prompt_positions(self, positions: Tensor) -> Tensor:
        return self._known.prompt_positions(positions)


def _arrange_codebook(known: ImageLanguageModel, vocab: int, ids: Tensor | None) -> Tensor | None:
    """Return the codes of the ids of a call, float `[V, C]`."""
    if known.codebook is None:
        return None
    codes = known.codebook.float()
    own = torch.arange(len(codes)) if known.ids is None else known.ids.cpu()
    places = {number: place for place, number in enumerate(own.tolist()[: len(codes)])}
    wanted = range(vocab) if ids is None else ids.tolist()
    rows = torch.tensor([places.get(each, len(codes)) for each in wanted], device=codes.device)
    return torch.cat([codes, codes.new_full((1, codes.shape[1]), _FAR)])[rows]


def is_image_call(kind: type[ImageLanguageModel], options: dict[str, Any]) -> bool:
    """Whether a call may generate an image; all others go to the original `generate` as they are."""
    if issubclass(kind, Janus):
        return options.get("generation_mode") == "image"
    name = "image_grid_thw" if issubclass(kind, GLMImage) else "prefix_allowed_tokens_fn"
    return options.get(name) is not None


def plan_call(known: ImageLanguageModel, call: GenerateCall) -> ImagePlan:
    """Return how our loop runs a call; `PassThroughError` for one that it does not run."""
    if isinstance(known, Janus):
        assert call.negative is not None
        rows = PromptRows(call.ids, call.valid, PromptRows(*call.negative))
        return ImagePlan(call, known, rows, whole_sequence=False)
    if isinstance(known, GLMImage):
        return _plan_grids(known, call)
    return _plan_schedule(known, call)


def _plan_grids(known: GLMImage, call: GenerateCall) -> ImagePlan:
    """Plan a call of GLM-Image: the grids of one image, the last one first, then the token after them.

    All ids of its head may be sampled, as in transformers, also those that mark the start and the end of images.
    """
    model = known.model
    if call.guidance_scale != 1 or call.allowed is not None:
        raise PassThroughError("guidance_scale or prefix_allowed_tokens_fn is given")
    sizes = read_grids(call.ids, model.config.image_end_token_id, **call.inputs)
    offsets = grid_offsets(sizes)
    T = call.max_new_tokens
    if not 1 <= T <= offsets.shape[1] + 1:
        raise PassThroughError(f"max_new_tokens is {T}, and the image has {offsets.shape[1]} tokens")
    vocab = model.config.text_config.vision_vocab_size
    description = CallDescription(known, (1, T), vocab, offsets=offsets.to(known.device))
    if len(sizes) == 2 and offsets.shape[1] <= T:
        description.low_res = PreviewDrafter(vocab, sizes[0], sizes[1])
        description.low_res.grid = description.grid
    return ImagePlan(call, description, PromptRows(call.ids, call.valid))


def read_grids(
    ids: Tensor, image_end: int, image_grid_thw: Tensor, images_per_sample: Tensor | None = None, **_: Any
) -> list[tuple[int, int]]:
    """Return rows and columns of the grids of an image of GLM-Image, in the order of their tokens, for prompts `[B, P]`.

    Raises:
        PassThroughError: if images differ in size, or a prompt holds an image, which ends with the id `image_end`.
    """
    grids, count = image_grid_thw, images_per_sample
    parts = [grids] * len(ids) if count is None else list(grids.split(count.tolist()))
    if len(parts) != len(ids) or any(not torch.equal(each, parts[0]) for each in parts):
        raise PassThroughError("image_grid_thw does not have the same grids for each prompt")
    if (ids == image_end).any():
        raise PassThroughError("the prompt holds an image")
    return [(int(rows), int(columns)) for _, rows, columns in reversed(parts[0].tolist())]


def _plan_schedule(known: ImageLanguageModel, call: GenerateCall) -> ImagePlan:
    """Plan a call with `prefix_allowed_tokens_fn`, which allows a set of ids in the image, and one id elsewhere."""
    assert call.allowed is not None
    allowed = AllowedIds(call.allowed)
    schedule = _expect_allowed(allowed, call)
    sets = list(dict.fromkeys(each for each in schedule if len(each) > 1))
    if len(sets) != 1:
        raise PassThroughError(f"prefix_allowed_tokens_fn allows {len(sets)} different sets of ids")
    image, single = set(sets[0]), {each[0] for each in schedule if len(each) == 1}
    if image & single:
        raise PassThroughError("prefix_allowed_tokens_fn allows an image id alone")
    if known.ids is not None and not image & set(known.ids.tolist()):
        raise PassThroughError("prefix_allowed_tokens_fn allows no image ids")
    ids = [*sorted(image), *sorted(single)]
    place = {number: index for index, number in enumerate(ids)}
    forced = [place[each[0]] if len(each) == 1 else -1 for each in schedule]
    columns = next((number + 1 for number, token in enumerate(forced) if token >= 0), len(forced))
    forced += [forced[-1]] * (-len(forced) % columns)  # the last row of the grid is filled, and cut off later
    if forced[-1] < 0 and len(forced) > len(schedule):
        columns, forced = len(schedule), forced[: len(schedule)]
    grid = len(forced) // columns, columns
    has_forced = any(token >= 0 for token in forced)
    description = CallDescription(
        known, grid, len(ids), torch.tensor(ids, device=known.device), torch.tensor(forced) if has_forced else None
    )
    rows = PromptRows(call.ids, call.valid)
    if call.guidance_scale != 1:
        negative = call.negative or (call.ids[:, -1:], torch.ones_like(call.valid[:, -1:]))
        if len(negative[0]) != len(call.ids):
            raise PassThroughError(f"{len(negative[0])} negative prompts are given for {len(call.ids)} prompts")
        rows = replace(rows, unconditional=PromptRows(*negative))
    return ImagePlan(call, description, rows, tuple(schedule), allowed)


class AllowedIds:
    """A `prefix_allowed_tokens_fn` whose answers are tuples; equal ones are the same object.

    Functions return the same list of some ten thousand ids at almost every position: it is read once.
    """

    def __init__(self, function: Callable[[int, Tensor], Any]):
        self._function = function
        self._read: dict[int, tuple[Any, list[int], Allowed]] = {}  # by address: the answer, as it was, and read
        self._known: dict[Allowed, Allowed] = {}

    def __call__(self, number: int, sequence: Tensor) -> Allowed:
        """Return the ids that may follow a sequence `[P]` of the batch; `PassThroughError` if there are none."""
        answer = self._function(number, sequence)
        if isinstance(answer, list | tuple) and id(answer) in self._read:
            _, before, ids = self._read[id(answer)]
            if before == list(answer):  # a function may change the list that it returned
                return ids
        if isinstance(answer, Tensor) and (answer.dim() != 1 or answer.dtype in (torch.bool, torch.uint8)):
            raise PassThroughError(f"prefix_allowed_tokens_fn returns a {answer.dtype} of {answer.dim()} dimensions")
        if not isinstance(answer, list | tuple | range) and not hasattr(answer, "tolist"):
            raise PassThroughError(f"prefix_allowed_tokens_fn returns a {type(answer).__name__}")
        ids = tuple(sorted(map(int, answer.tolist() if isinstance(answer, Tensor) else list(answer))))
        if not ids:
            raise PassThroughError("prefix_allowed_tokens_fn allows no id")
        ids = self._known.setdefault(ids, ids)
        if len(self._read) < 100:
            self._read[id(answer)] = answer, list(answer), ids
        return ids


def _expect_allowed(allowed: AllowedIds, call: GenerateCall) -> list[Allowed]:
    """Return the ids that a function allows at each position, asked about the first prompt with the first allowed ids."""
    prompt = call.ids[0]
    sequence = torch.cat([prompt, prompt.new_zeros(call.max_new_tokens)])
    found: list[Allowed] = []
    for position in range(call.max_new_tokens):
        length = len(prompt) + position
        try:
            found.append(allowed(0, sequence[:length]))
        except PassThroughError:
            raise
        except Exception as error:  # on ids that may never be sampled
            raise PassThroughError(f"prefix_allowed_tokens_fn fails in advance: {one_line(error)}") from error
        sequence[length] = found[-1][0]
        if len(found[-1]) == 1 and found[-1][0] in call.end:
            break
    return found


def find_change(plan: ImagePlan, number: int, new: Tensor) -> int | None:
    """Return the first position at which the function of a call allows other ids than expected, or None.

    Args:
        number: of the sequence.
        new: int64 `[T]`, its new ids, which the function is asked about one by one, up to its end.
    """
    if plan.allowed is None:
        return None
    prompt = plan.call.ids[number]
    sequence = torch.cat([prompt, new.to(prompt)])
    for position, expected in enumerate(plan.schedule[: len(new)]):
        if plan.allowed(number, sequence[: len(prompt) + position]) is not expected:
            return position
    return None


def cut_at_end(new: Tensor, end: Sequence[int]) -> Tensor:
    """Return new ids `[T]` up to the first that ends the sequence, with it."""
    if not end:
        return new
    stops = torch.isin(new, torch.tensor(end, device=new.device)).nonzero()
    return new if not len(stops) else new[: int(stops[0]) + 1]
