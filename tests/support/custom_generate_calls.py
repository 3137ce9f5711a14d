"""Calls of `generate` with an exported folder, in an interpreter that cannot import vargen: torch and transformers alone.

python -I custom_generate_calls.py FOLDER CALLS RESULTS: CALLS is a file of a model and the arguments of calls, RESULTS that of
what each returns, or the text of its error, with the passes of its network.
"""

import sys
from typing import Any

import torch


class RowsOfImage:
    """`prefix_allowed_tokens_fn` of Emu3 for an image of some rows and columns of `image` ids: their ends, then the image's."""

    def __init__(self, rows: int, columns: int, image: list[int], wrap: int, line: int, last: list[int]):
        self.size, self.image, self.wrap, self.line, self.last = (rows, columns), image, wrap, line, last

    def __call__(self, number: int, sequence: Any) -> Any:
        offset = len(sequence) - int((sequence == self.wrap).nonzero()[0])
        rows, columns = self.size
        after = offset - rows * (columns + 1) - 1
        if after >= 0:
            return (self.last[min(after, len(self.last) - 1)],)
        return (self.line,) if offset % (columns + 1) == 0 else self.image


class Blocker:
    """Refuses to find vargen."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "vargen":
            raise ImportError("vargen is not installed here")


def count_passes(model: Any, call: Any) -> tuple[Any, int]:
    """Return what a call returns, and the number of passes of the language model's layers."""
    passes = []
    body = getattr(model.model, "text_model", None) or model.model.language_model
    hook = body.layers[0].register_forward_hook(lambda *_: passes.append(1))
    try:
        return call(), len(passes)
    finally:
        hook.remove()


def hide_broken_torchvision() -> None:
    """Let transformers do without a torchvision whose binary does not load with this torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [each for each in sys.modules if each.startswith("torchvision.")]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def main(folder: str, calls: str, results: str) -> None:
    sys.meta_path.insert(0, Blocker())
    hide_broken_torchvision()
    sys.modules["custom_generate_calls"] = sys.modules["__main__"]  # of functions in the file
    model, given = torch.load(calls, weights_only=False)
    found = []
    for seed, arguments in given:
        torch.manual_seed(seed)
        try:
            found.append(
                count_passes(
                    model, lambda given=arguments: model.generate(**given, custom_generate=folder, trust_remote_code=True)
                )
            )
        except (ValueError, TypeError) as error:
            found.append((f"{type(error).__name__}: {error}", 0))
    assert not any(name.partition(".")[0] == "vargen" for name in sys.modules)
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
