"""arXiv 2510.03784: how many heads, how wide; its bound, experiments and open questions."""
