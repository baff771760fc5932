"""Training after a cut: the cut model learns from the model it was cut from.

Only the attention projections are trained. The loss is the divergence from the dense model's
predictions, plus a little of the next token's own loss; the loop is the one that trains from
scratch, so a killed recovery goes on to the same losses, and torchrun shares the batches.

    OUT.partial/   metrics.jsonl, checkpoints/; a killed run goes on from the newest
    OUT            the recovered model, there only when it is whole
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor, nn
from torch.nn import functional

from headwise.artifacts import atomic_folder, refuse_existing, versions
from headwise.errors import HeadwiseError
from headwise.nn.attention_headwise import PROJECTIONS
from headwise.nn.checkpoint import Checkpoint
from headwise.nn.companions import copy_companions
from headwise.nn.modeling_headwise import HeadwisePreTrainedModel
from headwise.training.batches import Batch, WindowBatches, held_out_batches
from headwise.training.engine import Job
from headwise.training.loop import Observer, Outcome, run
from headwise.training.metrics import read_rows
from headwise.training.processes import on_main
from headwise.training.run_folder import RunFolder
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

RECORD = "headwise.json"
NEXT_TOKEN_SHARE = 0.1  # of the next token's own loss, beside the whole divergence


@dataclass(frozen=True, slots=True)
class Recovery:
    """A cut model (its folder, and loaded in fp32), its teacher, and the tokens to learn from."""

    folder: Path
    model: HeadwisePreTrainedModel
    teacher: nn.Module
    tokens: Integer[np.ndarray, " n"]
    held_out: Integer[np.ndarray, " m"]
    text_sha256: str
    settings: TrainSettings  # resolved


def divergence_loss(teacher: nn.Module) -> Any:
    """Divergence of a model's predictions from the teacher's, plus a share of the next token's."""

    def loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"], use_cache=False).logits.float()
        given = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        logs = given.log_softmax(-1).flatten(0, 1)
        kl = functional.kl_div(
            logs, wanted.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
        )
        nll = functional.nll_loss(logs, batch["labels"].flatten())
        return kl + NEXT_TOKEN_SHARE * nll, {"kl": kl, "nll": nll}

    return loss


def recover(
    task: Recovery,
    output: Path,
    processes: Accelerator,
    *,
    force: bool = False,
    observer: Observer | None = None,
    finishing: Callable[[Path], None] | None = None,
) -> Outcome:
    """Train the cut model, or go on training it, and write the recovered one.

    `finishing` may add files to the new folder before it takes its place.
    """
    refuse_existing(output, force=force)
    folder = RunFolder(output.with_name(f"{output.name}.partial"))
    on_main(processes, lambda: _begin(folder, _key(task)))
    _train_attention_only(task.model)
    job = _job(task, processes)
    outcome = run(job, processes, folder=folder, observer=observer)
    if not outcome.signal:

        def write() -> None:
            with atomic_folder(output, force=force) as made:
                # The row on disk, not this process's: the last step may be that of a killed one.
                _write(task, made, read_rows(folder.metrics)[-1])
                if finishing is not None:
                    finishing(made)

        on_main(processes, write)
        on_main(processes, lambda: shutil.rmtree(folder.path))
    return outcome


def _job(task: Recovery, processes: Accelerator) -> Job:
    settings = task.settings
    assert settings.context is not None
    sizes = {"context": settings.context, "batch_size": settings.batch_size}
    teacher = task.teacher.to(processes.device).eval().requires_grad_(False)
    return Job(
        model=task.model,
        loss=divergence_loss(teacher),
        batches=WindowBatches(task.tokens, seed=settings.seed, **sizes),
        settings=settings,
        held_out=held_out_batches(task.held_out, most=settings.eval_windows, **sizes),
    )


def _train_attention_only(model: HeadwisePreTrainedModel) -> None:
    model.requires_grad_(False)
    for attention in model.attentions():
        for name in PROJECTIONS.values():
            projection = getattr(attention, name, None)
            if projection is not None:
                projection.requires_grad_()


def _key(task: Recovery) -> str:
    """What the run depends on; a partial run of anything else is not continued."""
    digest = hashlib.sha256(json.dumps(task.settings.to_dict(), sort_keys=True).encode())
    digest.update(str(task.folder.resolve()).encode())
    digest.update(np.ascontiguousarray(task.tokens).tobytes())
    return digest.hexdigest()


def _begin(folder: RunFolder, key: str) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.record.exists():
        folder.write_record({"key": key, "status": "running"})
    elif folder.read_record().get("key") != key:
        raise HeadwiseError(
            f"{folder.path} is a recovery of another model, text or settings; finish it with "
            "those, or remove it."
        )
    folder.sweep()


def _write(task: Recovery, folder: Path, last: Mapping[str, Any]) -> None:
    """The recovered model in the number format of the cut one, with what belongs to it."""
    checkpoint = Checkpoint.open(task.folder)
    stored = next(one.dtype for one in checkpoint.stored.values())
    model: Any = task.model
    # A number that came from bf16 goes back to the same bf16: only the attention changes.
    model.to(stored).save_pretrained(folder)
    copy_companions(task.folder, folder)
    try:
        record = json.loads((task.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    record["recovery"] = {
        "text_sha256": task.text_sha256,
        "tokens": last["tokens"],
        "held_out_loss": last.get("held_out_loss"),
        "settings": task.settings.to_dict(),
        "versions": dict(versions(("headwise", "torch", "transformers", "accelerate"))),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
