"""Published methods of cutting attention, at a counted number of parameters.

A cut that folds into the weights is a projection in the dense model. Every method here therefore
returns four projections of the dense shape per layer (dropped planes and heads are zero rows) and
the number of parameters of its folded form, so all methods are measured in the same way. None of
them uses a refit of W_O or widths by sensitivity: those are ours (`headwise.cutting.run`).
"""
