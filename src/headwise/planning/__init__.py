"""Numbers in, plans out: how to spend a budget on the attention of a model.

A `ModelShape` and a `Budget` enter `design` (a new model), or the worth of every direction of a
profiled model enters `fit`; a `Plan` leaves. `widths` turns value curves into head widths,
`solver` and `knapsack` find the best ones, and `cost` counts what a plan costs.
"""
