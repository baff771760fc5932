"""`make test-vllm`: what is exported to stock runs in real vLLM on the CPU.

Run by headwise's own Python with the path of a Python that has vLLM:

    .venv/bin/python tests/vllm_check.py .venv-vllm/bin/python

A small random Llama, dense and cut to one head width, is exported; vLLM continues a prompt. Tokens
must be ours, log-probabilities within 1e-4 nats, and the cut model's cache must hold as many more
tokens in the same memory as its plan says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import headwise as hw
from headwise.data.text import read_source
from headwise.data.tokens import trained_tokenizer
from tests.exporting.portable import portable, saved

SIZES = {"head_dim": 64, "hidden_size": 96, "vocab_size": 293, "max_position_embeddings": 256}
# Query-key planes and value width: 64/64, and half of both, which its CPU kernels take.
MODELS = {"dense": (None, 64), "cut": ((*range(0, 30, 2), 31), 32)}
PROMPT = list(range(10, 40))
NEW = 12

IN_VLLM = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    asked = json.loads(sys.argv[1])
    sizes = {"max_model_len": 128, "max_num_seqs": 2}
    llm = LLM(asked["model"], dtype="float32", enforce_eager=True, **sizes)
    how = SamplingParams(temperature=0, max_tokens=asked["new"], logprobs=1, ignore_eos=True)
    out = llm.generate({"prompt_token_ids": asked["prompt"]}, how)[0].outputs[0]
    found = [one[token].logprob for one, token in zip(out.logprobs, out.token_ids)]
    cache = llm.llm_engine.vllm_config.cache_config
    blocks = (cache.num_gpu_blocks or 0) * cache.block_size
    print("FOUND" + json.dumps({"tokens": list(out.token_ids), "logprobs": found, "room": blocks}))
"""


def in_vllm(python: str, folder: Path, place: Path) -> dict:
    script = place / "run.py"
    script.write_text(IN_VLLM)
    asked = json.dumps({"model": str(folder), "prompt": PROMPT, "new": NEW})
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [python, str(script), asked],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("FOUND")]
    if not lines:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(lines[-1].removeprefix("FOUND"))


def main() -> None:
    text = "\n".join(read_source("builtin:python", max_chars=20_000).documents)
    tokenizer = trained_tokenizer([text], SIZES["vocab_size"])
    room = {}
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name, (planes, vo_dim) in MODELS.items():
            model = portable("llama", planes, vo_dim, scale=0.08, **SIZES)
            folder = saved(model, place / name)
            tokenizer.save_pretrained(folder)
            hw.export(folder, to="stock", out=place / f"{name}-stock")
            found = in_vllm(sys.argv[1], place / f"{name}-stock", place)
            with torch.no_grad():
                ids = torch.tensor([PROMPT])
                own = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
                scores = model(own).logits[0].double().log_softmax(-1)
            tokens = own[0, len(PROMPT) :].tolist()
            expected = [float(scores[len(PROMPT) - 1 + i, t]) for i, t in enumerate(tokens)]
            error = max(abs(a - b) for a, b in zip(expected, found["logprobs"], strict=True))
            assert found["tokens"] == tokens, (name, found["tokens"], tokens)
            assert error < 1e-4, (name, error)
            room[name] = found["room"]
            print(f"{name}: {NEW} tokens agree, log-probabilities within {error:.1e} nats, "
                  f"room for {found['room']:,} tokens in 1 GiB")  # fmt: skip
    if room["dense"]:
        gain = room["cut"] / room["dense"]
        print(f"The cut model's cache holds {gain:.3f} times as many tokens.")
        assert 1.9 < gain < 2.1, gain


if __name__ == "__main__":
    main()
