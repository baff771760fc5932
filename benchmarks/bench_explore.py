"""The explorer's answer to a moved slider, through its server, as one JSON document.

A profile of 32 layers with 32 heads of 128 dimensions (the largest case that is promised), and one
with 8 key-value heads. Every question is a new one, so that no answer is remembered. Milliseconds
of the clock are what a person waits, and depend on what else runs here, as the load average tells;
those of the processor hardly do. The first answer for a rule prepares its curves and is left out.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.profiling.format import Profile, ProfileRecord, TextRecord
from headwise.reporting.explorer.answers import Answers
from headwise.reporting.explorer.server import Server, live_page

LAYERS, HEADS, DIM, TARGET_MS = 32, 32, 128, 100.0
QUESTIONS = [f"attn_params={x}" for x in range(51, 71)]
QUESTIONS += [f"attn_params={x}&kv_bytes={x - 3}&flops=80" for x in range(71, 91)]


def profile(groups: int) -> Profile:
    """Power-law sensitivities, each layer with its own scale."""
    shape = ModelShape(
        n_layers=LAYERS,
        d_model=HEADS * DIM,
        context=4096,
        n_heads=HEADS,
        n_kv_heads=groups,
        qk_dim=DIM,
        vo_dim=DIM,
        vocab_size=32000,
        ffn_dim=11008,
    )
    planes = tuple(range(DIM // 2))
    head = HeadSpec(
        qk_dim=DIM, vo_dim=DIM, queries=HEADS // groups, score_scale=0.1, rotary_planes=planes
    )
    plan = Plan(shape=shape, layers=(LayerPlan(heads=(head,) * groups),) * LAYERS)
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{i}.{part}_sensitivity": scale
        * rng.lognormal(0.0, 1.5, (groups, n))
        / np.arange(1, n + 1)
        for i, scale in enumerate(rng.lognormal(-7, 1, LAYERS))
        for part, n in (("vo", DIM), ("plane", DIM // 2))
    }
    record = ProfileRecord(
        model="made up",
        weights_sha256="",
        dtype="float32",
        device="cpu",
        objective="next-token",
        text=TextRecord(source="made up", sha256=""),
        settings={},
        sequences=1,
        tokens=1,
        loss=2.0,
        lengths=(4,),
        qk_whole=False,
        centred=False,
        versions={},
        plan={"format": plan.format, **plan.to_dict()},
        tensors={},
        tensors_sha256="",
    )
    return Profile(record, tensors, "")


def waits(server: Server, rules: str) -> dict[str, Any]:
    """Milliseconds per question."""
    clock, processor = [], []
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    for question in ("attn_params=95", *QUESTIONS):
        start, busy = time.perf_counter(), time.process_time()
        connection.request("GET", f"/plan?{question}&{rules}")
        answer = json.loads(connection.getresponse().read())
        clock.append(1e3 * (time.perf_counter() - start))
        processor.append(1e3 * (time.process_time() - busy))
        assert "loss" in answer, answer
    connection.close()
    return {
        "clock": _spread(clock[1:]),
        "processor": _spread(processor[1:]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "most": round(max(values), 1)}


def main() -> None:
    cases = {}
    for groups in (32, 8):
        answers = Answers(profile(groups))
        with Server(answers, live_page(answers, str(Path("made-up.profile")))) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            for granularity in ("head", "layer", "model"):
                for multiple in (8, 1):
                    rules = f"granularity={granularity}&multiple_of={multiple}"
                    cases[f"{groups} key-value heads, {granularity}, multiples of {multiple}"] = (
                        waits(server, rules)
                    )
            server.shutdown()
            thread.join()
    document = {
        "layers": LAYERS,
        "heads": HEADS,
        "width": DIM,
        "milliseconds_target": TARGET_MS,
        "questions": len(QUESTIONS),
        "load_average": os.getloadavg()[0],
        "milliseconds": cases,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
