"""arXiv 2510.23912: a Transformer without W_Q, and what else can be folded away."""
