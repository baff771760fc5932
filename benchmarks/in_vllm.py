"""What vLLM does with a folder, told as JSON. Run by a Python that has vLLM, and needs no headwise.

    python benchmarks/in_vllm.py '{"model": "served", "prompts": [[1, 2, 3]], "new": 12}'

`prompts` are token ids, given at once, so that vLLM batches them as far as its cache of
`cache_bytes` allows. `repeats` runs them again after a first time that is not told. `contexts` asks
for the seconds of reading a prompt of each length and of `new` tokens after it, one by one.
"""

# mypy: ignore-errors

import json
import sys
import time


def main() -> None:
    """Load, continue, tell."""
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.argv[1])
    prompts, new = asked.get("prompts", []), asked["new"]
    contexts, repeats = asked.get("contexts", []), asked.get("repeats", 0)
    longest = max([*map(len, prompts), *contexts]) + new
    llm = LLM(
        asked["model"],
        dtype=asked.get("dtype", "float32"),
        enforce_eager=True,
        trust_remote_code=asked.get("trust", False),
        max_model_len=longest + 1,
        max_num_seqs=asked.get("sequences", 2),
        kv_cache_memory_bytes=asked.get("cache_bytes", 2**28),
        enable_prefix_caching=False,
    )

    def run(given, count):
        how = SamplingParams(temperature=0, max_tokens=count, logprobs=1, ignore_eos=True)
        start = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": p} for p in given], how, use_tqdm=False)
        return time.perf_counter() - start, [one.outputs[0] for one in found]

    cache = llm.llm_engine.vllm_config.cache_config
    told = {"room": (cache.num_gpu_blocks or 0) * cache.block_size, "contexts": {}}
    for context in contexts:
        prompt = [[7 + i % 1000 for i in range(context)]]
        run(prompt, 2)
        pairs = []
        for _ in range(repeats + 1):
            read, _ = run(prompt, 1)
            whole, _ = run(prompt, 1 + new)
            pairs.append((read, whole - read))
        told["contexts"][str(context)] = pairs
    if prompts:
        seconds = [run(prompts, new) for _ in range(1 + repeats)]
        answers = seconds[-1][1]
        told["seconds"] = [took for took, _ in seconds[1:] or seconds]
        told["tokens"] = [list(a.token_ids) for a in answers]
        told["logprobs"] = [
            [one[t].logprob for one, t in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ]
    print("FOUND" + json.dumps(told))


if __name__ == "__main__":
    main()
