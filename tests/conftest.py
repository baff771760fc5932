"""Shape annotations are checked at run time in every test (jaxtyping + beartype)."""

from jaxtyping import install_import_hook

install_import_hook(["headwise.theory", "headwise.planning"], "beartype.beartype")
