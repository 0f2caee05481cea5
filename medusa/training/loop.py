"""The training loop: steps, evaluations, the best checkpoint, and a state that any interruption resumes from.

An output folder holds the best checkpoint so far (`medusa.checkpoint`), the resolved `recipe.yaml` and
`training/`: `state.pt` to resume from, `metrics.json` with every evaluation, and the trackers' logs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from tqdm import tqdm

from medusa import provenance
from medusa.checkpoint import CONFIG, save_checkpoint
from medusa.errors import MedusaError
from medusa.files import write_json
from medusa.hardware import native_bf16
from medusa.training.batches import Batch, draft_lookup, make_batch, plan_epoch
from medusa.training.evaluate import choose_segments, evaluate
from medusa.training.objective import Objective
from medusa.training.recipe import Recipe
from medusa.training.schedule import Average, cosine_rate
from medusa.training.sources import open_sources
from medusa.training.start import first_heads
from medusa.training.state import StopRequest, load_state, run_key, save_state, sweep
from medusa.training.trackers import check_trackers, flat


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        folder: the output folder.
        steps: optimiser steps done, of all in this run and those before it.
        total_steps: steps the recipe asks for.
        stopped: the signal that stopped it early, resumable; None when it is done.
        best: the evaluation that the checkpoint on disk comes from.
        tokens_per_second: answer tokens trained on, per second of this process group, evaluations left out.
    """

    folder: Path
    steps: int
    total_steps: int
    stopped: int | None
    best: dict[str, Any] | None
    tokens_per_second: float


def train(
    recipe: Recipe, out: str | os.PathLike, *, resume: bool = False, argv: Sequence[str] | None = None
) -> TrainingResult:
    """Trains heads as `recipe` says and leaves the best checkpoint in `out`.

    Run under `accelerate launch` or torchrun, every process calls this.

    Args:
        recipe: of `load_recipe`.
        out: output folder.
        resume: go on from `out/training/state.pt` if it is there; a finished run returns at once.
        argv: the command, for the provenance.

    Raises:
        MedusaError: bad data, base or recipe; `out` holds a run and `resume` is off; a loss was not finite
            (the message names the conversations; the last good checkpoint stays).
    """
    out = Path(out)
    state_file = out / "training" / "state.pt"
    if state_file.exists() and not resume:
        raise MedusaError(
            f"{out} holds a training run already; add --resume to go on with it, or name another folder"
        )
    if (out / CONFIG).exists() and not state_file.parent.exists():
        raise MedusaError(
            f"{out} holds a finished checkpoint, which training would replace; name another folder"
        )
    run = _Run(recipe, out, argv)
    if state_file.exists():
        run.restore(state_file)
    with StopRequest() as stop:
        return run.go(stop)


class _Run:
    """One process's part of a run."""

    def __init__(self, recipe: Recipe, out: Path, argv: Sequence[str] | None):
        settings = recipe.training
        self.recipe, self.out, self.argv = recipe, out, argv
        check_trackers(settings.trackers)
        probe = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        bf16 = settings.precision == "bf16" or (settings.precision == "auto" and native_bf16(probe))
        self.accelerator = Accelerator(
            mixed_precision="bf16" if bf16 else "no",
            cpu=probe.type == "cpu",
            log_with=list(settings.trackers),
            project_config=ProjectConfiguration(
                project_dir=str(out / "training"), logging_dir=str(out / "training")
            ),
            # Buffers (the draft vocabulary) never change; sending them every step would.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.base, self.source, self.validation, self.fingerprints = open_sources(
            recipe, dtype, self.accelerator.device
        )
        heads, self.started_from = first_heads(recipe, self.base, self.source)
        self.heads = heads.to(self.accelerator.device)
        self.lookup = draft_lookup(heads.draft_vocab, self.base.vocab_size)
        self.segments = choose_segments(self.validation.lengths, recipe.evaluation.max_tokens)
        self.steps_an_epoch = len(self._plan(0))
        self.total = self.steps_an_epoch * settings.epochs
        objective = Objective(
            self.heads,
            self.base,
            loss=settings.loss,
            sampled=settings.sampled,
            head_decay=settings.head_decay,
        )
        optimizer = torch.optim.AdamW(
            self.heads.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.average = Average(list(self.heads.parameters()), settings.ema)
        self.key = run_key(recipe, self.fingerprints, self.accelerator.num_processes)
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        settings = self.recipe.training
        return plan_epoch(
            self.source.lengths,
            batch_tokens=settings.batch_tokens,
            seed=settings.seed,
            epoch=epoch,
            world=self.accelerator.num_processes,
            accumulation=settings.accumulation,
        )

    def restore(self, file: Path) -> None:
        state = load_state(file, self.key)
        self.heads.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        for mine, saved in zip(self.average.values, state["average"], strict=True):
            mine.copy_(saved)
        self.step, self.best, self.history = state["step"], state["best"], state["history"]

    def save(self) -> None:
        if self.accelerator.is_main_process:
            state = {
                "key": self.key,
                "step": self.step,
                "weights": self.heads.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.values,
                "best": self.best,
                "history": self.history,
            }
            save_state(self.out / "training" / "state.pt", state)

    def go(self, stop: StopRequest) -> TrainingResult:
        """Steps until the end, or until a signal asks for a stop."""
        settings, main = self.recipe.training, self.accelerator.is_main_process
        if self.step == self.total:
            return TrainingResult(self.out, self.step, self.total, None, self.best, 0.0)
        if main:
            sweep(self.out)
            self.recipe.save(self.out / "recipe.yaml")
            (self.out / "training").mkdir(parents=True, exist_ok=True)
        self.accelerator.init_trackers("logs", config=flat(self.recipe.model_dump(mode="json")))
        plan_of, plan, stopped = -1, [], None
        tokens, seconds = 0, 0.0
        bar = tqdm(
            total=self.total,
            initial=self.step,
            desc=f"train {self.heads.config.kind}",
            disable=not main,
            mininterval=0.5 if sys.stderr.isatty() else 15.0,  # a log file keeps every line
        )
        if self.started_from is not None and not self.history:
            self._evaluate(bar, 0.0)  # heads that only get worse must not replace those they began as
        while self.step < self.total:
            stopped = self._agreed(stop.signal)
            if stopped is not None:
                break
            epoch, place = divmod(self.step, self.steps_an_epoch)
            if plan_of != epoch:
                plan_of, plan = epoch, self._plan(epoch)
            began = time.perf_counter()
            figures = self._optimise(plan[place])
            seconds += time.perf_counter() - began
            tokens += figures.pop("tokens")
            self.step += 1
            bar.update()
            bar.set_postfix(loss=f"{figures['loss']:.3f}", tok_s=f"{tokens / seconds:.0f}", refresh=False)
            if self.step % settings.log_steps == 0:
                self.accelerator.log(
                    {f"train/{name}": value for name, value in figures.items()}, step=self.step
                )
            every = self.recipe.evaluation.steps or self.steps_an_epoch
            if self.step % every == 0 or self.step == self.total:
                self._evaluate(bar, tokens / seconds)
            if self.step % settings.save_steps == 0 or self.step == self.total:
                self.save()
        if stopped is not None:
            self.save()
        bar.close()
        self.accelerator.end_training()
        rate = tokens / seconds if seconds else 0.0
        return TrainingResult(self.out, self.step, self.total, stopped, self.best, rate)

    def _agreed(self, number: int | None) -> int | None:
        """A signal that reached any process stops all of them at the same step."""
        if self.accelerator.num_processes == 1:
            return number
        flags = self.accelerator.gather(torch.tensor([number or 0], device=self.accelerator.device))
        return int(flags.max()) or None

    def _optimise(self, group: list[list[int]]) -> dict[str, float]:
        """One optimiser step over this process's batches of the group."""
        accelerator, settings = self.accelerator, self.recipe.training
        world, num_heads = accelerator.num_processes, self.heads.config.num_heads
        mine = group[accelerator.process_index :: world]
        batches = [make_batch(self.source.get(ids), num_heads, self.lookup) for ids in mine]
        counts = torch.stack([(batch.targets >= 0).sum(dim=1) for batch in batches]).sum(dim=0)
        facts = torch.cat([counts, torch.tensor([sum(len(batch) for batch in batches)])]).to(
            accelerator.device
        )
        facts = accelerator.reduce(facts, reduction="sum")
        counts, tokens = facts[:-1], int(facts[-1])
        # Whatever a kind of heads draws at random is a function of seed, step and process: a resumed run
        # draws it too.
        torch.manual_seed(hash((settings.seed, self.step, accelerator.process_index)) % 2**63)
        rate = settings.learning_rate * cosine_rate(
            self.step, self.total, settings.warmup, settings.final_rate
        )
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        sums = torch.zeros(num_heads, device=accelerator.device)
        for number, batch in enumerate(batches):
            # Gradients cross processes once a step, with the last batch.
            with (
                accelerator.no_sync(self.objective) if number + 1 < len(batches) else contextlib.nullcontext()
            ):
                device = accelerator.device
                hidden, words, targets = (t.to(device) for t in (batch.hidden, batch.tokens, batch.targets))
                loss, of_heads = self.objective(hidden, words, targets, counts)
                if not bool(torch.isfinite(loss)):
                    self._refuse(f"the loss is {loss.item()}", batch)
                # accelerate averages gradients over processes; `counts` is of all of them already.
                accelerator.backward(loss * world)
            sums += of_heads
        norm = accelerator.clip_grad_norm_(self.heads.parameters(), settings.clip)
        if not bool(torch.isfinite(norm)):
            self._refuse(f"the gradient's norm is {float(norm)}", *batches)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.step)
        means = accelerator.reduce(sums, reduction="sum") / counts.clamp(min=1)
        weighted = sum(settings.head_decay**k * float(mean) for k, mean in enumerate(means, 1))
        heads = {f"loss_head_{k}": float(mean) for k, mean in enumerate(means, 1)}
        return {"loss": weighted, "rate": rate, "norm": float(norm), "tokens": tokens, **heads}

    def _refuse(self, what: str, *batches: Batch) -> None:
        bad = [row for batch in batches for row in batch.nonfinite_rows()]
        rows = bad or [row for batch in batches for row in batch.rows]
        kept = (
            f"the checkpoint of step {self.best['step']} stays"
            if self.best
            else "no checkpoint was written yet"
        )
        why = "hold hidden states that are not finite" if bad else "make up the batch"
        raise MedusaError(
            f"training: {what} at step {self.step}; conversations {', '.join(map(str, rows))} {why}. "
            f"Stopped; {kept}. Remove or rebuild these rows, or lower training.learning_rate"
        )

    def _evaluate(self, bar: tqdm, tokens_per_second: float) -> None:
        self.heads.eval()
        with self.average.applied(), self.accelerator.autocast():
            metrics, calibration, tree = evaluate(
                self.heads,
                self.base,
                self.validation,
                self.segments,
                tree_width=self.recipe.evaluation.tree_width,
                accelerator=self.accelerator,
            )
            metrics = {"step": self.step, "epoch": self.step / self.steps_an_epoch, **metrics}
            self.history.append(metrics)
            tau = metrics["acceptance_length"]
            better = self.best is None or tau > self.best["acceptance_length"]
            if better:
                self.best = metrics
            if better and self.accelerator.is_main_process:
                self._publish(calibration, tree, tokens_per_second)
        self.heads.train()
        if self.accelerator.is_main_process:
            write_json(self.out / "training" / "metrics.json", self.history)
            top1 = " ".join(f"{share:.3f}" for share in metrics["accuracy"]["1"])
            bar.write(f"step {self.step}: acceptance length {tau:.3f} ({tree.width} nodes), top-1 {top1}")
        logged = {
            f"validation/top{top}_head_{k}": share
            for top, row in metrics["accuracy"].items()
            for k, share in enumerate(row, 1)
        }
        self.accelerator.log({"validation/acceptance_length": tau, **logged}, step=self.step)

    def _publish(self, calibration: Any, tree: Any, tokens_per_second: float) -> None:
        card = self.recipe.card
        earlier = {} if self.started_from is None else {"started_from": self.started_from}
        made = provenance.collect(
            base=self.base,
            data=self.fingerprints,
            recipe=self.recipe.model_dump(mode="json"),
            argv=self.argv,
            training={
                **self.best,
                "total_steps": self.total,
                "tokens_per_second": round(tokens_per_second, 1),
            },
            **earlier,
        )
        figures = {
            f"simulated acceptance length, {tree.width} nodes": f"{self.best['acceptance_length']:.3f}",
            "trained for": f"{self.step} of {self.total} steps",
        }
        save_checkpoint(
            self.out,
            self.heads,
            tree,
            base=self.base,
            provenance=made,
            calibration=calibration,
            card={
                "license": card.license,
                "base_model": card.base_model,
                "language": card.language,
                "figures": figures,
            },
            dtype=getattr(torch, card.weights_dtype),
        )
