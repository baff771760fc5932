"""What vLLM does with a folder, told as JSON. Run by a Python that has vLLM, and needs no headwise.

    python benchmarks/in_vllm.py '{"model": "served", "prompts": [[1, 2, 3]], "new": 12}'

The prompts are token ids; all are given at once, so that vLLM batches them as its cache allows.
`repeats` runs them again and tells the seconds of each run after a first one.
"""

# mypy: ignore-errors

import json
import sys
import time


def main() -> None:
    """Load, continue, tell."""
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.argv[1])
    prompts, new = asked["prompts"], asked["new"]
    longest = max(map(len, prompts)) + new
    llm = LLM(
        asked["model"],
        dtype=asked.get("dtype", "float32"),
        enforce_eager=True,
        trust_remote_code=asked.get("trust", False),
        max_model_len=longest,
        max_num_seqs=asked.get("sequences", 2),
        enable_prefix_caching=False,
    )
    how = SamplingParams(temperature=0, max_tokens=new, logprobs=1, ignore_eos=True)
    given = [{"prompt_token_ids": p} for p in prompts]
    seconds = []
    for _ in range(1 + asked.get("repeats", 0)):
        start = time.perf_counter()
        found = llm.generate(given, how, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    answers = [one.outputs[0] for one in found]
    cache = llm.llm_engine.vllm_config.cache_config
    told = {
        "tokens": [list(a.token_ids) for a in answers],
        "logprobs": [
            [one[t].logprob for one, t in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ],
        "room": (cache.num_gpu_blocks or 0) * cache.block_size,
        "seconds": seconds[1:] or seconds,
    }
    print("FOUND" + json.dumps(told))


if __name__ == "__main__":
    main()
