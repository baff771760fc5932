"""Planning: how to spend a budget on the heads and MLPs of a model.

`design` takes a `ModelShape` and a `Budget` (a new model), `fit` the worth of every direction of a
profiled model; both return a `Plan`. `widths` turns value curves into head widths,
`solver` and `knapsack` find the best ones, and `cost` counts what a plan costs.
"""
