"""Train a drafter on the features of a frozen transformer, such as an EAGLE layer.

The target runs teacher-forced over images that it generated, with both CFG rows, and the drafter learns its *guided* and
filtered probabilities, against which drafts are verified. What the drafter returns in training is its own `training_outputs`.

Shape suffixes: B images, R rows (2 B with guidance, conditional first), N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vargen.decoding import Accelerator, decode, exact
from vargen.decoding.sampling import to_probs
from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.pipelines.components import Component
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.loading import check_model_folder
from vargen.pipelines.registry import open_pipeline
from vargen.training.generated_images import GeneratedImages, PromptSource
from vargen.training.heads_config import HeadConfig
from vargen.training.run import TrainingRun
from vargen.weight_files import weights_digest

logger = logging.getLogger("vargen")

_SLOTS = 1024  # positions per chunk of logits: a whole batch would exceed a CPU's cache, and some memories
_DEPTH = 4  # consecutive drafts of a drafter that can make any number
_DECODED = 4  # held-out images generated with the trained drafter
_MEASURED = 32  # held-out images per point of the curve


def find_drafter(kind: str) -> Component:
    """Return the registration of a trained drafter; ValueError for an unknown kind."""
    known = LlamaGenPipeline.family.drafters
    if kind not in known:
        raise ValueError(f"kind must be {' or '.join(map(repr, known))}, got {kind!r}")
    return known[kind]


def new_drafter(kind: str, target: Any, given: dict[str, Any]) -> Any:
    """Create a drafter for a target's config.

    Args:
        kind: name of a trained drafter, such as `"eagle"`. given: constructor arguments other than the target's sizes.

    Raises:
        ValueError: for an unknown kind, a setting that the drafter does not have, or unsupported sizes.
    """
    network_class = find_drafter(kind).network_class
    try:
        return network_class(**{**{name: target[name] for name in network_class.target_settings}, **given})
    except TypeError as error:
        raise ValueError(f"model has a setting that {network_class.__name__} lacks: {error}") from error


def load_target(model: Any, device: torch.device) -> LlamaGenPipeline:
    """Load a LlamaGen to draft for in float32, packaged or from a folder; ValueError for a model of another family."""
    if check_model_folder(model).family is not LlamaGenPipeline.family:
        raise ValueError(f"model must be a LlamaGen, whose features heads take, got {str(model)!r}")
    return open_pipeline(model, torch_dtype=torch.float32).to(device)


def train_head(
    kind: str,
    recipe: HeadConfig,
    pipe: LlamaGenPipeline,
    subjects: PromptSource,
    folder: Path,
    drawn_folder: Path | None = None,
) -> dict[str, float]:
    """Generate images, then train until `recipe.schedule.steps`, resuming the run in `folder`.

    The weights are saved to `folder/drafter`.

    Args:
        kind: name of a trained drafter, such as `"eagle"`. pipe: the target, on the training device; its weights do not change.
        subjects: the conditions to generate images from. drawn_folder: where these are stored; default: `folder/drawn`.

    Returns:
        Metrics on held-out images: for draft i, `overlap_i`, the probability that the exact rule accepts it if the earlier
            drafts were accepted; `content_overlap_i`, the same without positions of the most frequent token; and
            `tokens_per_pass` of a chain.

    Raises:
        ValueError: for an unknown kind or setting, a run or images in `folder` from another config or target, or a run that
            diverged.
    """
    trainer = _Trainer(kind, recipe, pipe, subjects, folder, drawn_folder or folder / "drawn")
    run, steps = trainer.run, recipe.schedule.steps
    start = trainer.resumed()
    trainer.drawn.draw()
    trainer.begin(start)
    for step in run.progress(start):
        losses = trainer.step(step)
        done = step + 1
        if done % 10 == 0:
            run.log(done, **losses)
        if done % recipe.evaluate_every == 0 or done == steps:
            run.log(done, **trainer.evaluate(_MEASURED))
        if done % recipe.checkpoint_every == 0 or done == steps:
            trainer.save(done)
    figures = trainer.finish()
    logger.info("%s drafter %s: %s", kind, folder, figures)
    return figures


class _Trainer:
    """A drafter, its frozen target, and the state that training changes."""

    def __init__(
        self, kind: str, recipe: HeadConfig, pipe: LlamaGenPipeline, subjects: PromptSource, folder: Path, drawn_folder: Path
    ):
        torch.manual_seed(recipe.seed)
        self.kind, self.recipe, self.pipe, self.folder = kind, recipe, pipe, folder
        self.target = pipe.transformer.eval().requires_grad_(False)
        self.device = self.target.device
        self.fast = preferred_dtype(self.device) == torch.bfloat16
        self.drafter = new_drafter(kind, self.target.config, recipe.model).to(self.device)
        self.drawn = GeneratedImages(drawn_folder, pipe, subjects, recipe)
        identity = {"kind": kind, "model": recipe.model, "seed": recipe.seed, "target": weights_digest(self.target)}
        self.run = TrainingRun(folder, identity, recipe.schedule.steps)
        rate, decay = recipe.schedule.learning_rate, recipe.weight_decay
        self.stepper = torch.optim.AdamW(self.drafter.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)

    def resumed(self) -> int:
        """Restore the checkpoint in the folder, if any; returns the next step."""
        state = self.run.resume(self.device, ("model", "optimizer"))
        if not state:
            return 0
        self.drafter.load_state_dict(state["model"])
        self.stepper.load_state_dict(state["optimizer"])
        return state["step"]

    def save(self, step: int) -> None:
        self.run.checkpoint(step, model=self.drafter.state_dict(), optimizer=self.stepper.state_dict())

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Measure the scales that normalize the inputs, before the first step."""
        if step:
            return
        hidden, _, _ = self.taught(list(range(min(self.recipe.batch_size, self.drawn.training))))
        self.drafter.feature_scale.copy_(hidden.float().square().mean((0, 1)).sqrt().clamp(min=1e-4))
        self.drafter.token_scale.copy_(self.target.tok_embeddings.weight.float().square().mean().sqrt().clamp(min=1e-4))

    # -- one batch ------------------------------------------------------------------------------------------------------

    @property
    def _guidance(self) -> float | None:
        return None if self.drawn.scale == 1.0 else self.drawn.scale

    @torch.no_grad()
    def taught(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Run the target teacher-forced over the images with these numbers.

        Returns:
            Hidden states `[R, N, D]`, of which row j predicts token j; embeddings of the tokens `[R, N, D]`; and the target's
                probabilities `[B, N, V]` of each token.
        """
        tokens = torch.from_numpy(self.drawn.tokens[list(numbers)].astype(np.int64)).to(self.device)
        condition = self.drawn.condition(numbers)
        rows = tokens
        if self._guidance is not None:
            rows, condition = tokens.repeat(2, 1), condition.join(self.target.null_condition(condition))
        output = self.target(rows, condition, guidance=self._guidance)
        heat = self.drawn.temperature(numbers, self.device)
        plain = replace(self.drawn.sampling, temperature=1.0)
        probs = to_probs(output.logits.float() / heat[:, None, None].clamp(min=1e-5), plain)
        return output.hidden.float(), self.target.tok_embeddings(rows).float(), probs

    def step(self, step: int) -> dict[str, Tensor]:
        """Run one training step; returns its losses."""
        recipe = self.recipe
        for group in self.stepper.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        draw = np.random.default_rng((recipe.seed, step))
        numbers = draw.choice(self.drawn.training, min(recipe.batch_size, self.drawn.training), replace=False).tolist()
        self.drafter.train()
        heat = self.drawn.temperature(numbers, self.device)
        scale = self.drafter.feature_scale
        divergence = features = torch.zeros((), device=self.device)
        total = 0.0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.fast):
            hidden, embeddings, probs = self.taught(numbers)
            for depth, drafted in enumerate(self.drafter.training_outputs(hidden, embeddings, self.recipe.unrolled)):
                weight, first = recipe.weight(depth), depth + 1
                total += weight
                divergence = divergence + weight * self._divergence(drafted, probs[:, first:], heat)
                if self.drafter.trains_features and recipe.feature_weight:
                    features = features + weight * F.smooth_l1_loss(drafted / scale, hidden[:, first:] / scale)
        loss = (divergence + recipe.feature_weight * features) / total
        self.stepper.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.stepper.step()
        found = {"loss": loss.detach(), "divergence": divergence.detach() / total}
        return found | ({"features": features.detach() / total} if self.drafter.trains_features else {})

    def _divergence(self, drafted: Tensor, probs: Tensor, heat: Tensor) -> Tensor:
        """Return the mean KL(p || q) in nats, with p `[B, T, V]` and q from features `[R, T, D]`.

        q is not filtered, so that every token gets a gradient.
        """
        T = drafted.shape[1]
        size = max(1, _SLOTS // len(probs))
        total = drafted.new_zeros(())
        for start in range(0, T, size):
            part = slice(start, start + size)
            # Checkpointed: logits are recomputed chunk by chunk in the backward pass, and not stored.
            total = total + checkpoint(self._piece, drafted[:, part], probs[:, part], heat, use_reentrant=False)
        return total / (len(probs) * T)

    def _piece(self, drafted: Tensor, probs: Tensor, heat: Tensor) -> Tensor:
        logits = self.target.head(drafted.to(self.target.dtype), self._guidance) / heat[:, None, None].clamp(min=1e-5)
        entropy = torch.special.entr(probs).sum()
        return -(probs * logits.log_softmax(-1)).sum() - entropy

    # -- metrics --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, most: int | None = None) -> dict[str, float]:
        """Return the overlaps of p and q on held-out images, with q filtered as in drafting; see `train_head`."""
        self.drafter.eval()
        held = list(range(self.drawn.training, self.recipe.pictures))[:most]
        common = int(np.bincount(self.drawn.tokens[held].ravel()).argmax())
        found: dict[str, float] = {}
        counts: dict[str, float] = {}
        for start in range(0, len(held), self.recipe.batch_size):
            numbers = held[start : start + self.recipe.batch_size]
            hidden, embeddings, probs = self.taught(numbers)
            heat = self.drawn.temperature(numbers, self.device)[:, None, None].clamp(min=1e-5)
            tokens = torch.from_numpy(self.drawn.tokens[numbers]).to(self.device)
            for depth, drafted in enumerate(self.drafter.training_outputs(hidden, embeddings, self.recipe.unrolled)):
                logits = self.target.head(drafted.to(self.target.dtype), self._guidance)
                q = to_probs(logits / heat, replace(self.drawn.sampling, temperature=1.0))
                overlap = torch.minimum(probs[:, depth + 1 :], q).sum(-1)
                content = tokens[:, depth + 1 :] != common
                for name, values in ((f"overlap_{depth + 1}", overlap), (f"content_overlap_{depth + 1}", overlap[content])):
                    found[name] = found.get(name, 0.0) + float(values.sum())
                    counts[name] = counts.get(name, 0.0) + values.numel()
        self.drafter.train()
        return {name: value / max(counts[name], 1) for name, value in found.items()}

    @torch.no_grad()
    def tokens_per_pass(self) -> float:
        """Measure tokens per pass of a chain of drafts on a few held-out conditions, with seeds that no training image has."""
        self.drafter.eval()
        model = self.pipe.decoding_model(self.drawn.scale)
        held = list(range(self.drawn.training, self.recipe.pictures))[:_DECODED]
        component = find_drafter(self.kind)
        depth = min(self.drafter.config.get("heads", _DEPTH), self.pipe.tokens - 1)
        drafter = component.drafter(depth, model=component.adapter(self.drafter, model))
        method = Accelerator(self.kind, drafter, exact)
        seeds = torch.arange(len(held)) + (1 << 50)
        return decode(model, self.drawn.condition(held), seeds, method, self.drawn.sampling).stats.tokens_per_pass

    def finish(self) -> dict[str, float]:
        """Save the weights and plot the run; returns the metrics on all held-out images."""
        figures = {**self.evaluate(), "tokens_per_pass": self.tokens_per_pass()}
        if not all(math.isfinite(value) for value in figures.values()):
            raise ValueError(f"the run in {self.folder} diverged ({figures}): lower the learning rate")
        self.run.log(self.recipe.schedule.steps, **{f"final_{name}": value for name, value in figures.items()})
        with atomic_merge(self.folder / "drafter") as staged:
            self.drafter.eval().save_pretrained(staged)
        overlaps = [name for name in figures if name.startswith("overlap")]
        self.run.plot(("loss", "divergence"), tuple(overlaps))
        return figures
