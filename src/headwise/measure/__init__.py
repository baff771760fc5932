"""What a model does, as numbers.

Loaded models and texts (or images) enter; likelihoods, comparisons of two models, speeds, sizes and
the record of a verification leave. Nothing is trained or written here.
"""
