"""What vLLM does with a folder, told as JSON. Run by a Python that has vLLM, and needs no headwise.

    python benchmarks/in_vllm.py '{"model": "served", "prompts": [[1, 2, 3]], "new": 12}'

`prompts` are token ids, given at once, so that vLLM batches them as far as its cache of
`cache_bytes` allows; the tokens it adds and their log-probabilities are told. With `"serve": true`
it says how many tokens fit into the cache and then answers lines of standard input,
`{"prompts": …, "new": …}`, with the seconds until the first token and until the last.
"""

# mypy: ignore-errors

import json
import sys
import time


def main() -> None:
    """Load, continue, tell."""
    from vllm import LLM

    asked = json.loads(sys.argv[1])
    longest = asked.get("longest") or max(map(len, asked["prompts"])) + asked["new"]
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
    cache = llm.llm_engine.vllm_config.cache_config
    room = {"room": (cache.num_gpu_blocks or 0) * cache.block_size}
    if not asked.get("serve"):
        tell(room | continued(llm, asked["prompts"], asked["new"]))
        return
    tell(room)
    for line in sys.stdin:
        tell(timed(llm, **json.loads(line)))


def tell(found) -> None:
    print("FOUND" + json.dumps(found), flush=True)


def continued(llm, prompts, new):
    """The tokens after each prompt."""
    given = [{"prompt_token_ids": p} for p in prompts]
    answers = [one.outputs[0] for one in llm.generate(given, greedy(new, logprobs=1))]
    return {
        "tokens": [list(a.token_ids) for a in answers],
        "logprobs": [
            [one[t].logprob for one, t in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ],
    }


def timed(llm, prompts, new):
    """Seconds from the question until the first new token of any prompt, and until the end."""
    engine, first = llm.llm_engine, None
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{start}-{i}", {"prompt_token_ids": prompt}, greedy(new))
    while engine.has_unfinished_requests():
        if engine.step() and first is None:
            first = time.perf_counter() - start
    return {"first": first, "whole": time.perf_counter() - start}


def greedy(new, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **more)


if __name__ == "__main__":
    main()
