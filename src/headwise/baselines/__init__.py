"""The field's ways to cut attention, each as it was published, at a counted number of parameters.

A cut that folds into the weights is a projection in the dense model, so every method here gives
four projections of the dense shape per layer (dropped planes and heads are zero rows) and the
number of parameters its folded form would have. One way of measuring then serves them all. None of
them is given a refit of W_O or widths by sensitivity: those are ours (`headwise.cutting.run`).
"""
