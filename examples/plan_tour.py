"""The planner at work: one budget, some policies, and what the theory says about the heads.

Run by `make demo`. Writes nothing.
"""

from __future__ import annotations

import subprocess
import sys

MODEL = "--layers 12 --d-model 768 --heads 12 --context 1024"
COMMANDS = (
    f"plan new {MODEL} --attn-params 75% --policy uniform",
    f"plan new {MODEL} --attn-params 75% --policy more-heads-late",
    f"plan new {MODEL} --attn-params 75% --policy theory --token-dim 32",
    f"plan new {MODEL} --attn-params 75% --kv-bytes 50% --flops 85%",
    "theory allocate --width 256 --token-dim 8 --kernel 1,1,1,1",
    "theory advise --d-model 768 --heads 12 --head-dim 64 --context 1024",
)


def main() -> None:
    """Show each command and its answer."""
    for command in COMMANDS:
        sys.stdout.write(f"\n$ headwise {command}\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "headwise", *command.split()], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
