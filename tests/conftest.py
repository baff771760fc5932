"""Shape annotations are checked in every test (jaxtyping + beartype); one thread per worker."""

import os

# Set before NumPy or torch load. Small matrices on two threads in two workers only get in each
# other's way, and one thread makes sums reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the tests may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

CHECKED = ("theory", "planning", "compress", "data.tasks", "nn.one_layer")
install_import_hook([f"headwise.{room}" for room in CHECKED], "beartype.beartype")
