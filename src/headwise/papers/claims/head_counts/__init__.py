"""Why not more heads: five views of what a number of heads gives and costs."""
