"""Train a `LlamaGenTransformer` on the tokens of captioned pictures; stop at the best held-out loss.

An over-fitted model has peaked probabilities, which would flatter every speculative method measured on it, hence the stop at
the best held-out loss, and the entropy that is reported beside it.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.device import fast_dtype
from vargen.files import whole_files
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.vq import VQModel
from vargen.training.emoji import EmojiDataset, captions
from vargen.training.generator_data import Batches, CaptionFeatures, TokenStore, check_fit
from vargen.training.generator_losses import CodePrior, Plan, drop_captions, noisy
from vargen.training.muon import Muon
from vargen.training.recipe import GeneratorRecipe
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the last weights in a mix with the best


def optimizers(model: LlamaGenTransformer, prior: CodePrior, recipe: GeneratorRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks and caption projection, AdamW for embeddings, head and norms; or AdamW for all."""
    inside = ("layers.", "cls_embedding.cap_proj.")
    blocks = [p for name, p in model.named_parameters() if name.startswith(inside) and p.dim() == 2]
    taken = {id(p) for p in blocks} if recipe.optimizer == "muon" else set()
    rest = [p for p in [*model.parameters(), *prior.parameters()] if id(p) not in taken]
    adamw = torch.optim.AdamW(rest, lr=recipe.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if recipe.optimizer == "adamw":
        return [adamw]
    if recipe.optimizer != "muon":
        raise ValueError(f"optimizer must be 'muon' or 'adamw', got {recipe.optimizer!r}")
    return [Muon(blocks, lr=recipe.schedule.learning_rate, weight_decay=recipe.weight_decay), adamw]


@torch.no_grad()
def evaluate_generator(
    model: LlamaGenTransformer,
    store: TokenStore,
    indices: np.ndarray,
    data: EmojiDataset,
    features: CaptionFeatures,
    batch_size: int = 16,
) -> dict[str, float]:
    """Loss and mean entropy of next-token probabilities on pictures `indices`, plainly captioned, in nats per token."""
    model.eval()
    loss = entropy = count = 0.0
    amp = torch.autocast(features.device.type, torch.bfloat16, enabled=fast_dtype(features.device) == torch.bfloat16)
    for start in range(0, len(indices), batch_size):
        part = indices[start : start + batch_size]
        rows = store(part, np.zeros_like(part)).to(features.device)
        with amp:
            logits = model(rows, features([captions(data.records[i])[0] for i in part])).logits
        log_probs = logits.log_softmax(-1)
        loss -= log_probs.gather(-1, rows[..., None]).sum().item()
        entropy -= (log_probs.exp() * log_probs).sum().item()
        count += rows.numel()
    model.train()
    return {"held_out_loss": loss / count, "entropy": entropy / count}


def check_recipe(recipe: GeneratorRecipe) -> None:
    """Raise ValueError for a share of noise outside [0, 1], a negative weight or count, or captions without a weight."""
    if not 0 <= recipe.token_noise <= 1:
        raise ValueError(f"token_noise must be a share from 0 to 1, got {recipe.token_noise}")
    if recipe.plan_weight < 0 or recipe.plan_captions < 0 or (recipe.plan_captions and not recipe.plan_weight):
        raise ValueError(
            f"plan_weight and plan_captions must be 0 or more, and captions need a weight above 0; got plan_weight "
            f"{recipe.plan_weight}, plan_captions {recipe.plan_captions}"
        )


def train_generator(
    recipe: GeneratorRecipe,
    data: EmojiDataset,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; weights land in `folder/transformer`.

    These are the best by held-out loss, mixed with as much of the last as does not make them worse.

    Args:
        tokenizer_folder: a saved `VQModel`. text_encoder_folder: holds `text_encoder/` and `tokenizer/`.

    Returns:
        The held-out figures of these weights: `held_out_loss` and `entropy`, nats per token.

    Raises:
        ValueError: for a share of noise outside [0, 1], a negative weight or number of captions, captions without a weight,
            pictures, tokenizer and model that do not fit each other, a run or tokens in `folder` that are damaged, or one that
            diverged.
    """
    check_recipe(recipe)
    trainer = _Trainer(recipe, data, tokenizer_folder, text_encoder_folder, folder, device)
    run, steps = trainer.run, recipe.schedule.steps
    for step in run.progress(trainer.resumed()):
        loss, planned = trainer.step(step)
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss, **({"plan": planned} if recipe.plan_weight else {}))
        if done % recipe.evaluate_every == 0 or done == steps:
            trainer.evaluate(done)
        if done % recipe.checkpoint_every == 0 or done == steps:
            trainer.save(done)
    figures = trainer.finish()
    logger.info("generator %s: %s", folder, figures)
    return figures


class _Trainer:
    """A generator and all that its training changes.

    Attributes:
        best, best_weights: the least held-out loss so far, and the weights that had it.
    """

    def __init__(
        self,
        recipe: GeneratorRecipe,
        data: EmojiDataset,
        tokenizer_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
    ):
        torch.manual_seed(recipe.seed)
        self.recipe, self.data, self.folder, self.device = recipe, data, folder, device
        options: dict[str, Any] = {"condition": "text", "dropout": recipe.dropout, **recipe.model}
        self.model = LlamaGenTransformer(**options).to(device)
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device)
        check_fit(self.model, vqvae, data.images.shape[1])
        config = self.model.config
        identity = {"kind": "generator", "model": dict(recipe.model), "seed": recipe.seed}
        self.run = TrainingRun(folder, identity, recipe.schedule.steps)
        self.store = TokenStore(folder / "tokens.npz", data.images, vqvae, recipe, device)
        self.prior = CodePrior(vqvae.quantize.codebook().detach().float(), config.dim).to(device)
        self.evaluated = LlamaGenTransformer.from_config(config).to(device)  # the ordinary model that would be saved
        self.features = CaptionFeatures(text_encoder_folder, config.cls_token_num, device)
        self.held_out = data.indices("validation")
        self.sample = self.held_out[:: max(1, len(self.held_out) // 96)]  # for the curve; the final figures take all
        self.plan = Plan(config.dim, config.grid_size, math.gcd(8, config.grid_size)).to(device)
        planner = torch.optim.AdamW(self.plan.parameters(), lr=recipe.adamw_learning_rate)
        self.steppers = [*optimizers(self.model, self.prior, recipe), planner]
        self.batches = Batches(data, self.store, recipe)
        self.amp = torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)
        self.best, self.best_weights = float("inf"), dict[str, Tensor]()

    def resumed(self) -> int:
        """Take up what the folder holds; returns the step to go on with."""
        start, state = 0, self.run.resume(self.device, ("model", "prior", "optimizers"))
        if state:
            self.model.load_state_dict(state["model"])
            self.prior.load_state_dict(state["prior"])
            if "plan" in state:  # a run begun without it has none
                self.plan.load_state_dict(state["plan"])
            for stepper, saved in zip(self.steppers, state["optimizers"], strict="plan" in state):
                stepper.load_state_dict(saved)
            start = state["step"]
            if state.get("tokens") == self.store.made_of:  # losses on other tokens say nothing
                self.best, self.best_weights = state["best"], state["best_weights"]
        self.model.train()
        return start

    def save(self, step: int) -> None:
        self.store.save()
        self.run.checkpoint(
            step,
            model=self.model.state_dict(),
            prior=self.prior.state_dict(),
            plan=self.plan.state_dict(),
            optimizers=[stepper.state_dict() for stepper in self.steppers],
            tokens=self.store.made_of,
            best=self.best,
            best_weights=self.best_weights,
        )

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One step; returns the next-token loss and the plan's."""
        recipe, model, prior = self.recipe, self.model, self.prior
        for stepper in self.steppers:
            for group in stepper.param_groups:
                group["lr"] = stepper.defaults["lr"] * recipe.schedule.factor(step)
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # dropout and noise, too, are functions of the step
        rows, texts, dropped, pixels = self.batches(step)
        rows = rows.to(self.device)
        condition = drop_captions(self.features(texts), model, dropped)
        given = noisy(rows, recipe.token_noise) if recipe.token_noise else rows
        with self.amp:
            output = torch.func.functional_call(model, prior.weights(model), (given, condition))
        loss = F.cross_entropy(output.logits.flatten(0, 1), rows.flatten())
        planned = self.plan(output.features.float(), pixels) if recipe.plan_weight else loss.new_zeros(())
        for stepper in self.steppers:
            stepper.zero_grad(set_to_none=True)
        (loss + recipe.plan_weight * planned).backward()
        for asked, drawn in self.batches.captions(step):
            with self.amp:  # one token, which nothing follows: the caption's rows alone go through the model
                alone = model(rows.new_zeros(len(asked), 1), self.features(asked)).features
            share = recipe.plan_weight * len(asked) / recipe.plan_captions
            (share * self.plan(alone.float(), drawn)).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *prior.parameters()], 1.0)
        for stepper in self.steppers:
            stepper.step()
        return loss.detach(), planned.detach()

    def figures(self, weights: dict[str, Tensor], indices: np.ndarray) -> dict[str, float]:
        """Of weights, on pictures `indices`."""
        self.evaluated.load_state_dict(weights)
        return evaluate_generator(self.evaluated, self.store, indices, self.data, self.features)

    def evaluate(self, done: int) -> None:
        """Log the held-out figures, and keep the weights if they are the best so far."""
        weights = self.prior.folded(self.model)
        figures = self.figures(weights, self.sample)
        self.run.log(done, **figures)
        if figures["held_out_loss"] < self.best:
            self.best, self.best_weights = figures["held_out_loss"], weights

    def mixed(self) -> dict[str, Tensor]:
        """The last weights, with as much of the best in them as it takes to lose nothing on held-out pictures.

        Weights of one run average well (Izmailov et al. 2018, arXiv:1803.05407). Between the best and the last the held-out
        loss first falls, then rises to the last's, while training pictures are learned ever better.
        """
        last = self.prior.folded(self.model)
        if not self.best_weights:  # none yet: a finished run, opened with another tokenizer
            return last
        if torch.equal(self.best_weights["output.weight"], last["output.weight"]):
            return self.best_weights
        for share in _SHARES:
            weights = {key: self.best_weights[key].lerp(value, share) for key, value in last.items()}
            held = self.figures(weights, self.sample)["held_out_loss"]
            self.run.log(self.recipe.schedule.steps, share_of_last=share, mixed_held_out_loss=held)
            if held <= self.best:
                return weights
        return self.best_weights

    def finish(self) -> dict[str, float]:
        """Save the weights to keep, and plot the run; returns their figures on all held-out pictures."""
        figures = self.figures(self.mixed(), self.held_out)
        if not math.isfinite(figures["held_out_loss"]):
            found = figures["held_out_loss"]
            raise ValueError(f"the run in {self.folder} diverged (held-out loss {found}): lower the learning rates")
        steps = self.recipe.schedule.steps
        self.run.log(steps, final_held_out_loss=figures["held_out_loss"], final_entropy=figures["entropy"])
        with whole_files(self.folder / "transformer") as staged:
            self.evaluated.eval().save_pretrained(staged)
        self.run.plot(("loss", "held_out_loss"), ("entropy",))
        return figures
