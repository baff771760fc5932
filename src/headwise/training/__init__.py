"""Training a plan's model from scratch (`train`), and a cut model after its cut (`recover`).

Input: a text and a plan, or a text, a cut model and the model it was cut from. Output: a model
folder, with metrics and checkpoints during training; a killed run ends with the same weights. One
loop (`loop`) serves both, on one process or several.
"""
