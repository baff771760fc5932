"""Of how many first tokens does a cut model fail to make an attention sink? As JSON.

A causal model grows the state of a window's first token to hundreds of times the usual length, and
heads that look for nothing look there. Short openings of a text are run through both models. A
first token is lost if, after the layer where the dense model's are longest, its state is less than
half as long as the dense model's.

    python benchmarks/lost_sinks.py c50 builtin:smollm2 --text last40.txt
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from headwise.data.text import read_source
from headwise.data.tokens import token_stream
from headwise.source import open_source

OPENING = 4  # tokens


@torch.no_grad()
def first_lengths(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The length of every opening's first state after every layer but the last: layers × openings.

    The last one goes through the final norm.
    """
    rows = [
        torch.stack([h[:, 0].float().norm(dim=-1) for h in states.hidden_states[1:-1]])
        for some in torch.split(ids, 256)
        for states in (model(some, output_hidden_states=True, use_cache=False),)
    ]
    return torch.cat(rows, dim=1)


def main() -> None:
    """Print the count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("against")
    parser.add_argument("--text", required=True)
    parser.add_argument("--openings", type=int, default=1536)
    asked = parser.parse_args()
    source = open_source(asked.model)
    cut, words = source.load(), source.tokenizer
    dense = open_source(asked.against).load()
    tokens = torch.from_numpy(
        token_stream(words, read_source(asked.text).documents).astype("int64")
    )
    starts = torch.linspace(0, len(tokens) - OPENING, asked.openings).long()
    ids = tokens[starts[:, None] + torch.arange(OPENING)]
    whole = first_lengths(dense, ids)
    layer = int(whole.median(1).values.argmax())
    lost = first_lengths(cut, ids)[layer] < whole[layer] / 2
    found = {"openings": len(ids), "layer": layer, "lost": int(lost.sum())}
    print(json.dumps(found | {"dense_length": round(float(whole[layer].median()), 1)}))


if __name__ == "__main__":
    main()
